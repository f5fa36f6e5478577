"""Whether a model can be cut over training ranks, as `parallel` says, and over the ranks of an engine.

In: the config and a model's card. Out: one line per size that does not fit, with those that do. Must never import
torch, nor look at files.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmegatron.config.model_card import ModelCard
from rlmegatron.config.partition import stage_sizes
from rlmegatron.config.schema import ParallelConfig, RunConfig
from rlmegatron.config.wording import listed


def training_cuts(sizes: ParallelConfig, card: ModelCard, *, owner: str) -> Iterator[str]:
    """Whether Megatron can cut the model that the config key `owner` names."""
    of = "" if owner == "model.path" else f" of {owner}"
    yield from _tensor_cuts(card, "parallel.tensor", sizes.tensor, of=of)
    yield from _fused_cut(card, sizes.tensor, of=of)
    yield from _expert_cuts(card, sizes, of=of)
    yield from _stage_cuts(sizes, card.num_layers, of=of)


def engine_cuts(cfg: RunConfig, card: ModelCard) -> Iterator[str]:
    """Whether SGLang can cut the model over the ranks of an engine, of which tensor / expert share each expert."""
    tensor, expert, experts = cfg.rollout.tensor, cfg.rollout.expert, card.experts
    yield from _tensor_cuts(card, "rollout.tensor", tensor, of="")
    if experts is None:
        yield from _needless("rollout.expert", expert, card, of="")
        return
    yield from _undivided("rollout.expert", expert, "the number of experts", experts.num)
    if tensor % expert == 0:
        key = "rollout.tensor" if expert == 1 else "rollout.tensor / rollout.expert"
        yield from _undivided(key, tensor // expert, "the width of an expert", experts.ffn)


def _tensor_cuts(card: ModelCard, key: str, tensor: int, *, of: str) -> Iterator[str]:
    """Heads, and the widths that every token passes through; ranks may share a KV head, but not hold one and a half."""
    yield from _undivided(key, tensor, f"num_attention_heads{of}", card.num_heads)
    kv = card.num_kv_heads
    if kv is not None and kv % tensor and tensor % kv:
        fitting = [size for size in _divisors(card.num_heads) if not (kv % size and size % kv)]
        yield (
            f"{key}: {tensor} neither divides num_key_value_heads{of} ({kv}) nor is a multiple of it; use "
            f"{listed(fitting)}"
        )
    if card.has_dense_layers:
        yield from _undivided(key, tensor, f"intermediate_size{of}", card.ffn_size)
    if card.experts is not None and card.experts.shared_ffn:
        yield from _undivided(key, tensor, f"the width of the shared experts{of}", card.experts.shared_ffn)


def _fused_cut(card: ModelCard, tensor: int, *, of: str) -> Iterator[str]:
    """Where ranks share a KV head, Megatron cuts the rows of its fused queries, keys and values evenly over them."""
    if card.num_kv_heads is None or card.num_heads % tensor or tensor % card.num_kv_heads:
        return
    rows = (card.num_heads + 2 * card.num_kv_heads) * card.head_dim
    if rows % tensor:
        yield f"parallel.tensor: {tensor} does not divide the rows of queries, keys and values{of} ({rows})"


def _expert_cuts(card: ModelCard, sizes: ParallelConfig, *, of: str) -> Iterator[str]:
    experts = card.experts
    if experts is None:
        yield from _needless("parallel.expert", sizes.expert, card, of=of)
        yield from _needless("parallel.expert_tensor", sizes.expert_tensor, card, of=of)
        return
    yield from _undivided("parallel.expert", sizes.expert, f"the number of experts{of}", experts.num)
    yield from _undivided("parallel.expert_tensor", sizes.expert_tensor, f"the width of an expert{of}", experts.ffn)
    if sizes.tensor > 1 and not sizes.sequence:
        yield (
            f"parallel.sequence: false, but Megatron trains a mixture of experts{of} with parallel.tensor above 1 only "
            "with sequence parallelism; set parallel.sequence=true"
        )


def _stage_cuts(sizes: ParallelConfig, num_layers: int, *, of: str) -> Iterator[str]:
    first, last, pipeline = sizes.first_stage_layers, sizes.last_stage_layers, sizes.pipeline
    if first is not None or last is not None:
        if sizes.virtual_pipeline == 1 and pipeline > 1 and not _fits(sizes, num_layers, first, last):
            yield _uneven_stages(sizes, num_layers, of=of)
        return
    per_stage, chunks = num_layers // pipeline, sizes.virtual_pipeline
    if num_layers % pipeline:
        uneven = "" if chunks > 1 else "; or set parallel.first_stage_layers or last_stage_layers"
        yield (
            f"parallel.pipeline: {pipeline} does not divide num_hidden_layers{of} ({num_layers}); use "
            f"{divisors(num_layers)}{uneven}"
        )
    elif per_stage % chunks:
        yield (
            f"parallel.virtual_pipeline: {chunks} does not divide the {per_stage} layers of a pipeline stage{of}; use "
            f"{divisors(per_stage)}"
        )


def _uneven_stages(sizes: ParallelConfig, num_layers: int, *, of: str) -> str:
    """The line for stages that do not come out; it varies the last stage, or the first where that alone is given."""
    first, last = sizes.first_stage_layers, sizes.last_stage_layers
    key, given = ("first", first) if last is None else ("last", last)
    others = sizes.pipeline - (first is not None) - (last is not None)
    rest = max(0, num_layers - (first or 0) - (last or 0))
    candidates = range(1, num_layers)
    if key == "last":
        fitting = [size for size in candidates if _fits(sizes, num_layers, first, size)]
    else:
        fitting = [size for size in candidates if _fits(sizes, num_layers, size, None)]
    hint = f"use {listed(fitting)}" if fitting else "use other sizes"
    return (
        f"parallel.{key}_stage_layers: {given} leaves {rest} of num_hidden_layers{of} ({num_layers}) for the {others} "
        f"other pipeline stages, which must share them evenly; {hint}"
    )


def _fits(sizes: ParallelConfig, num_layers: int, first: int | None, last: int | None) -> bool:
    try:
        stage_sizes(num_layers=num_layers, pp=sizes.pipeline, vpp=sizes.virtual_pipeline, first=first, last=last)
    except ValueError:
        return False
    return True


def _needless(key: str, size: int, card: ModelCard, *, of: str) -> Iterator[str]:
    if size > 1:
        yield f"{key}: {size} needs a mixture of experts, and {card.architecture}{of} has none; use 1"


def _undivided(key: str, size: int, what: str, count: int) -> Iterator[str]:
    if count % size:
        yield f"{key}: {size} does not divide {what} ({count}); use {divisors(count)}"


def divisors(count: int) -> str:
    """'1, 2 or 4' for 4."""
    return listed(_divisors(count))


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
