"""The text of `--check`: who learns what and how, which ranks form which engine, how a batch divides, memory per rank.

In: a config whose rules hold, the world size and the model's card. Out: plain text. Must never import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmegatron.config.credit_report import OwnInputs, credit_rows, evaluation_rows
from rlmegatron.config.estimate import memory_of, rank_parameters
from rlmegatron.config.layout import Layout, layout_of
from rlmegatron.config.model_card import ExpertSizes, ModelCard
from rlmegatron.config.schema import RunConfig

_MOST_RANKS_LISTED = 16
_INDENT = "  "


def check_report(
    cfg: RunConfig,
    *,
    world_size: int,
    world_size_from: str,
    ranks_per_node: int | None = None,
    card: ModelCard,
    critic_card: ModelCard | None = None,
    own_inputs: OwnInputs | None = None,
    warnings: Sequence[str] = (),
) -> str:
    """The whole report.

    world_size_from: where the number of ranks came from, as 'from --ranks'. ranks_per_node: None where all are on one
    node. own_inputs: what functions of the user's own take.
    """
    layout = layout_of(cfg, world_size=world_size, ranks_per_node=ranks_per_node)
    evaluation = evaluation_rows(cfg)
    blocks = [
        _heading(cfg, card, layout, world_size_from=world_size_from),
        _models(cfg),
        ["credit", *_table(credit_rows(cfg, experts=card.experts, own_inputs=own_inputs))],
        _ranks(layout, card) if world_size <= _MOST_RANKS_LISTED else _stages(layout, card),
        _groups(layout, card),
        _batch(cfg, layout),
        *([["evaluation", *_table(evaluation)]] if evaluation else []),
        _memory(cfg, layout, card, critic_card),
    ]
    if warnings:
        blocks.append(["warnings", *(_INDENT + warning for warning in warnings)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _heading(cfg: RunConfig, card: ModelCard, layout: Layout, *, world_size_from: str) -> list[str]:
    tied = "tied" if card.tied_embeddings else "untied"
    keys = f"{card.num_kv_heads} KV heads" if card.num_kv_heads else f"a latent of {card.cached_values}"
    active = f", {card.active_parameters:,} of them for a token" if card.experts else ""
    return [
        f"run     {cfg.name} in {cfg.directory}",
        f"model   {card.path}: {card.architecture}, {card.num_parameters:,} parameters{active}",
        f"        {card.num_layers} layers, hidden {card.hidden_size}, {card.num_heads} heads of {card.head_dim} over "
        f"{keys}, {_mlp(card)}, vocabulary {card.vocab_size} ({tied}), {card.max_positions} positions",
        *(f"        left out: {reason}" for reason in card.left_out),
        f"world   {layout.world} {_plural('rank', layout.world)} ({world_size_from}){_nodes(layout)} = TP "
        f"{layout.tensor} x PP {layout.pipeline} x DP {layout.data}" + _options(cfg),
        *([_expert_world(layout)] if card.experts else []),
    ]


def _nodes(layout: Layout) -> str:
    size = layout.ranks_per_node
    return f" on nodes of {size}" if size is not None and size < layout.world else ""


def _mlp(card: ModelCard) -> str:
    experts, parts = card.experts, []
    if card.has_dense_layers:
        parts.append(f"MLP {card.ffn_size}")
    if experts is not None:
        where = f" in {len(experts.layers)} layers" if card.has_dense_layers else ""
        shared = f" + {experts.shared_ffn} shared" if experts.shared_ffn else ""
        parts.append(f"{experts.num} experts of {experts.ffn}{shared}{where}, {experts.top_k} for a token")
    return ", ".join(parts)


def _expert_world(layout: Layout) -> str:
    return (
        f"experts {layout.world} {_plural('rank', layout.world)} = ETP {layout.expert_tensor} x EP {layout.expert} x "
        f"PP {layout.pipeline} x expert DP {layout.expert_data}"
    )


def _options(cfg: RunConfig) -> str:
    options = []
    if cfg.parallel.virtual_pipeline > 1:
        options.append(f"VPP {cfg.parallel.virtual_pipeline}")
    if cfg.parallel.sequence:
        options.append("sequence parallelism")
    if cfg.parallel.distributed_optimizer:
        options.append("distributed optimizer")
    if cfg.model.recompute != "none":
        options.append(f"{cfg.model.recompute} recomputation")
    return f", {', '.join(options)}" if options else ""


def _models(cfg: RunConfig) -> list[str]:
    optimizer = cfg.actor.optimizer
    lines = [
        "models, each cut alike over all ranks",
        f"{_INDENT}actor      {cfg.model.dtype}, lr {optimizer.lr:g}, {optimizer.schedule}",
    ]
    if cfg.trains_critic:
        warmup = f", alone for {cfg.critic.warmup_steps} steps" if cfg.critic.warmup_steps else ""
        lines.append(
            f"{_INDENT}critic     {cfg.model.dtype}, from {cfg.critic.path or cfg.model.path}, "
            f"lr {cfg.critic.optimizer.lr:g}{warmup}"
        )
    if cfg.needs_reference:
        lines.append(f"{_INDENT}reference  {cfg.model.dtype}, frozen")
    spread = f", EP {cfg.rollout.expert}" if cfg.rollout.expert > 1 else ""
    lines.append(f"{_INDENT}engine     {cfg.engine_dtype}, SGLang, TP {cfg.rollout.tensor}{spread}")
    return lines


def _ranks(layout: Layout, card: ModelCard) -> list[str]:
    of_experts = ("etp", "ep", "edp") if card.experts else ()
    rows: list[tuple[str, ...]] = [("rank", "tp", "dp", "pp", *of_experts, "holds", "engine")]
    engines = layout.engines()
    engine_of = {rank: number for number, ranks in enumerate(engines) for rank in ranks}
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        engine = engine_of[rank]
        owner = " (owns its server)" if rank == engines[engine][0] else ""
        places = (at.tp, at.dp, at.pp, *((at.etp, at.ep, at.edp) if card.experts else ()))
        held = _holds(layout, card, at.pp)
        if card.experts:
            held += f", experts {_experts_of(card.experts, layout, at.ep)}"
        rows.append((str(rank), *map(str, places), held, f"{engine}{owner}"))
    return ["ranks", *_table(rows)]


def _stages(layout: Layout, card: ModelCard) -> list[str]:
    rows = [("stage", "ranks", "holds")]
    for stage in range(layout.pipeline):
        ranks = layout.stage_ranks(stage)
        rows.append((str(stage), f"{ranks[0]}-{ranks[-1]}", _holds(layout, card, stage)))
    return ["pipeline stages", *_table(rows)]


def _holds(layout: Layout, card: ModelCard, stage: int) -> str:
    chunks = layout.stage_layers(stage, num_layers=card.num_layers)
    layers = " + ".join(f"{c[0]}-{c[-1]}" if len(c) > 1 else str(c[0]) for c in chunks)
    parts = [f"{_plural('layer', sum(map(len, chunks)))} {layers}"]
    if stage == 0:
        parts.insert(0, "embedding")
    if stage == layout.pipeline - 1:
        parts.append("output")
    return ", ".join(parts)


def _experts_of(experts: ExpertSizes, layout: Layout, ep: int) -> str:
    size = experts.num // layout.expert
    return f"{ep * size}-{(ep + 1) * size - 1}" if size > 1 else str(ep)


def _groups(layout: Layout, card: ModelCard) -> list[str]:
    named = [
        ("tensor parallel", layout.groups("tp")),
        ("data parallel", layout.groups("dp")),
        ("pipeline parallel", layout.groups("pp")),
    ]
    of_experts = (
        ("expert tensor", layout.groups("etp")),
        ("expert parallel", layout.groups("ep")),
        ("expert data", layout.groups("edp")),
    )
    if card.experts:
        named += [(name, groups) for name, groups in of_experts if len(groups[0]) > 1]
    named.append(("engines", [list(ranks) for ranks in layout.engines()]))
    rows = [(name, f"{len(groups)} of {len(groups[0])}:", spans(groups)) for name, groups in named]
    return ["groups", *_table(rows)]


def spans(groups: Sequence[Sequence[int]]) -> str:
    """Groups of ranks as text; of many the first two and the last, as '0-1, 2-3, ..., 510-511'."""
    shown = [_span(group) for group in groups]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:2], "...", shown[-1]])


def _span(ranks: Sequence[int]) -> str:
    """Consecutive ranks as 'a-b', others as '{a, b, ...}'."""
    if len(ranks) == 1:
        return str(ranks[0])
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return "{" + ", ".join(shown if len(shown) <= 6 else [*shown[:2], "...", shown[-1]]) + "}"


def _batch(cfg: RunConfig, layout: Layout) -> list[str]:
    rollout, train = cfg.rollout, cfg.train
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = cfg.data.max_prompt_tokens + rollout.max_new_tokens
    updates = train.mini_batches * train.epochs
    per_update = samples // train.mini_batches
    rows = [
        ("samples", f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} = {samples}"),
        (
            "per engine",
            f"about {samples / layout.num_engines:g} samples, at most {rollout.max_running_requests} at a time",
        ),
        ("updates", f"{train.epochs} x {train.mini_batches} = {updates}, of {per_update} samples each"),
        (
            "tokens",
            f"at most {samples * longest:,} ({longest:,} a sample), micro-batches of {train.micro_batch_tokens:,}",
        ),
        (
            "whole run",
            f"{train.steps} steps, {train.steps * samples:,} samples, {_updates_of_the_run(cfg)}",
        ),
    ]
    return ["each step", *_table(rows)]


def _updates_of_the_run(cfg: RunConfig) -> str:
    actor, critic = max(cfg.num_actor_updates, 0), cfg.num_critic_updates
    if not cfg.trains_critic or actor == critic:
        return f"{actor:,} optimizer steps"
    return f"{actor:,} optimizer steps of the actor and {critic:,} of the critic"


def _memory(cfg: RunConfig, layout: Layout, card: ModelCard, critic_card: ModelCard | None) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("stage", "weights", "grads", "optimizer", "reference", "critic", "activations", "logits", "sum")
    ]
    engine = ""
    for stage in _different_stages(layout, card):
        memory = memory_of(cfg, layout, card, stage, critic_card=critic_card)
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.reference, memory.critic)
        sizes = (*parts, memory.activations, memory.logits, memory.training)
        rows.append((str(stage), *(in_units(size) for size in sizes)))
        cache = f"sized from mem_fraction {cfg.rollout.mem_fraction:g}"
        if memory.kv_cache is not None:
            cache = in_units(memory.kv_cache)
        engine = f"{_INDENT}while it generates: engine weights {in_units(memory.engine)}, KV cache {cache}"
    return ["memory of one rank, estimated (activations roughly)", *_table(rows), engine]


def _different_stages(layout: Layout, card: ModelCard) -> list[int]:
    """The first and the last stage, and those that hold other numbers than the stage before.

    What is left out is like its forerunner, with fewer micro-batches in flight.
    """
    held = [rank_parameters(card, layout, stage) for stage in range(layout.pipeline)]
    ends = (0, layout.pipeline - 1)
    return [stage for stage in range(layout.pipeline) if stage in ends or held[stage] != held[stage - 1]]


def in_units(size: int) -> str:
    """Bytes as text with a binary unit: 1536 is '1.5 KiB'."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        _INDENT + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
