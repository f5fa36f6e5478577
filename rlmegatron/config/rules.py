"""What must hold between the sections of a config, the model and the world, all of it reported at once.

In: the config, the world size and the model's card, where known. Out: one line per broken rule, and one per legal
choice that is probably not meant. Must never import torch, nor look at files (`paths.py` does, and `engine_args.py` at
those of SGLang).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from rlmegatron.config.algorithm_rules import algorithm_problems, expert_problems
from rlmegatron.config.algorithm_warnings import algorithm_warnings
from rlmegatron.config.cuts import divisors, engine_cuts, training_cuts
from rlmegatron.config.engine_args import engine_arg_problems
from rlmegatron.config.layout import model_ranks, smallest_world
from rlmegatron.config.model_card import ModelCard
from rlmegatron.config.other_libraries import name_elsewhere
from rlmegatron.config.own_module import file_refusal
from rlmegatron.config.partition import engine_groups, padded_vocab
from rlmegatron.config.schema import OptimizerConfig, RunConfig
from rlmegatron.config.settings_without_effect import settings_without_effect
from rlmegatron.config.wording import did_you_mean, listed, plain

_OWN_FUNCTION = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
_HIGHEST_LR = 1e-2


def problems(
    cfg: RunConfig,
    *,
    world_size: int | None,
    ranks_per_node: int | None = None,
    card: ModelCard | None,
    critic_card: ModelCard | None = None,
    known: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Every rule that `cfg` breaks, one line each; an empty list means that none is.

    world_size: ranks of the run, None if not known. ranks_per_node: None if all are on one node. card: the model, None
    if it could not be read. critic_card: the model at critic.path, if that is given. known: names by the config key
    that takes one, such as 'reward.name', from tables that lie in higher layers.
    """
    found = [*_parallel(cfg), *_batch(cfg), *_lengths(cfg), *_optimizer(cfg)]
    found += algorithm_problems(cfg)
    found += [*_engine_parts(cfg), *engine_arg_problems(cfg), *_weight_types(cfg)]
    if world_size is not None:
        found += _world(cfg, world_size, ranks_per_node=ranks_per_node)
    if card is not None:
        found += training_cuts(cfg.parallel, card, owner="model.path")
        found += [*_text(cfg, card), *engine_cuts(cfg, card), *_positions(cfg, card), *expert_problems(cfg, card)]
    if card is not None and critic_card is not None:
        found += _critic(cfg, card, critic_card)
    for key, names in (known or {}).items():
        found += _name(key, _value_at(cfg, key), names)
    return found


def warnings(cfg: RunConfig, *, world_size: int | None, card: ModelCard | None) -> list[str]:
    """Legal choices that are rarely meant, one line each with what they do."""
    found = [*algorithm_warnings(cfg), *settings_without_effect(cfg), *_fast_learning(cfg), *_short_run(cfg)]
    if world_size is not None and world_size % cfg.rollout.tensor == 0:
        num_engines = world_size // cfg.rollout.tensor
        if cfg.rollout.prompts_per_step < num_engines:
            found.append(
                f"rollout.prompts_per_step: {cfg.rollout.prompts_per_step} prompts for {num_engines} engines: some "
                "engines get none"
            )
    if card is not None:
        rows = padded_vocab(card.vocab_size, tensor=cfg.parallel.tensor)
        if rows > 2 * card.vocab_size:
            found.append(
                f"parallel.tensor: {cfg.parallel.tensor} pads the vocabulary from {card.vocab_size} to {rows} rows"
            )
    return found


def _weight_types(cfg: RunConfig) -> Iterator[str]:
    train, engine = cfg.model.dtype, cfg.engine_dtype
    if cfg.weight_sync.transport in ("peer", "collective") and train == "bf16" and engine == "fp32":
        yield (
            f"weight_sync.transport: '{cfg.weight_sync.transport}' cannot turn the learner's bf16 weights "
            "(model.dtype) into fp32 ones (rollout.dtype); use 'hf_stream' or 'auto'"
        )


def _parallel(cfg: RunConfig) -> Iterator[str]:
    sizes = cfg.parallel
    if sizes.sequence and sizes.tensor == 1:
        yield "parallel.sequence: true needs parallel.tensor above 1; it is 1"
    if sizes.virtual_pipeline > 1 and sizes.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline: {sizes.virtual_pipeline} needs parallel.pipeline above 1 (it interleaves "
            "stages); it is 1"
        )
    for key, layers in (
        ("first_stage_layers", sizes.first_stage_layers),
        ("last_stage_layers", sizes.last_stage_layers),
    ):
        if layers is not None and sizes.pipeline == 1:
            yield f"parallel.{key}: {layers} needs parallel.pipeline above 1; it is 1"
        if layers is not None and sizes.virtual_pipeline > 1:
            yield (
                f"parallel.{key}: {layers} cannot go with parallel.virtual_pipeline {sizes.virtual_pipeline}, which "
                "interleaves stages of one size; use one of the two"
            )


def _world(cfg: RunConfig, world_size: int, *, ranks_per_node: int | None) -> Iterator[str]:
    sizes, engine = cfg.parallel, cfg.rollout.tensor
    whole_models = model_ranks(sizes)
    if world_size % whole_models:
        yield (
            f"world size: {world_size} is not a multiple of {_ranks_of_a_model(cfg)} = {whole_models}); use a multiple "
            f"of {smallest_world(sizes, engine_tensor=engine)} ranks"
        )
        return
    if world_size % engine:
        yield f"rollout.tensor: {engine} does not divide the world size ({world_size}); use {divisors(world_size)}"
    else:
        yield from _engine_places(cfg, world_size, ranks_per_node=ranks_per_node)
    yield from _shares(cfg, num_replicas=world_size // (sizes.tensor * sizes.pipeline))


def _engine_places(cfg: RunConfig, world_size: int, *, ranks_per_node: int | None) -> Iterator[str]:
    tensor, train_tensor = cfg.rollout.tensor, cfg.parallel.tensor
    try:
        engine_groups(world_size=world_size, tensor=tensor, train_tensor=train_tensor, ranks_per_node=ranks_per_node)
    except ValueError as error:
        yield str(error)


def _ranks_of_a_model(cfg: RunConfig) -> str:
    """The product in words and numbers, with its bracket left open for the result."""
    sizes = cfg.parallel
    if sizes.expert * sizes.expert_tensor == 1:
        return f"parallel.tensor x parallel.pipeline ({sizes.tensor} x {sizes.pipeline}"
    return (
        "parallel.pipeline x the least common multiple of parallel.tensor and parallel.expert x parallel.expert_tensor "
        f"({sizes.pipeline} x lcm({sizes.tensor}, {sizes.expert} x {sizes.expert_tensor})"
    )


def _shares(cfg: RunConfig, *, num_replicas: int) -> Iterator[str]:
    """Every data-parallel rank needs a sample in every mini-batch."""
    samples, parts = cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt, cfg.train.mini_batches
    if samples < num_replicas:
        yield (
            f"rollout.prompts_per_step: {samples} samples per step are fewer than the {num_replicas} data-parallel "
            f"ranks; use at least {-(-num_replicas // cfg.rollout.samples_per_prompt)} prompts"
        )
    elif samples // parts < num_replicas:
        yield (
            f"train.mini_batches: {parts} mini-batches of {samples // parts} samples leave some of the {num_replicas} "
            f"data-parallel ranks without one; use at most {samples // num_replicas}"
        )


def _batch(cfg: RunConfig) -> Iterator[str]:
    prompts, parts = cfg.rollout.prompts_per_step, cfg.train.mini_batches
    samples = prompts * cfg.rollout.samples_per_prompt
    if samples % parts:
        yield (
            f"train.mini_batches: {parts} does not divide rollout.prompts_per_step x rollout.samples_per_prompt "
            f"({samples}); use {divisors(samples)}"
        )
    elif cfg.train.split == "group" and prompts % parts:
        yield (
            f"train.mini_batches: {parts} does not divide rollout.prompts_per_step ({prompts}), and answers to a "
            f"prompt stay together; use {divisors(prompts)}, or train.split: sample"
        )


def _lengths(cfg: RunConfig) -> Iterator[str]:
    needed = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    if cfg.context_length < needed:
        yield (
            f"rollout.context_length: {cfg.context_length} is shorter than data.max_prompt_tokens + "
            f"rollout.max_new_tokens ({needed}); use at least {needed}, or null"
        )
    cache = cfg.rollout.max_total_tokens
    if cache is not None and cache < needed:
        yield (
            f"rollout.max_total_tokens: a KV cache of {cache} tokens does not hold one sample "
            f"(data.max_prompt_tokens + rollout.max_new_tokens); use at least {needed}, or null"
        )


def _optimizers(cfg: RunConfig) -> dict[str, OptimizerConfig]:
    used = {"actor.optimizer": cfg.actor.optimizer}
    if cfg.trains_critic:
        used["critic.optimizer"] = cfg.critic.optimizer
    return used


def _optimizer(cfg: RunConfig) -> Iterator[str]:
    for where, optimizer in _optimizers(cfg).items():
        if any(not 0 <= beta < 1 for beta in optimizer.betas):
            yield f"{where}.betas: {list(optimizer.betas)} is not allowed; use numbers of at least 0 and below 1"
        if optimizer.schedule != "constant" and optimizer.min_lr > optimizer.lr:
            lr = f"{optimizer.lr:g}"
            yield f"{where}.min_lr: {optimizer.min_lr:g} is above {where}.lr ({lr}); use at most {lr}"


def _fast_learning(cfg: RunConfig) -> Iterator[str]:
    for where, optimizer in _optimizers(cfg).items():
        if optimizer.lr > _HIGHEST_LR:
            yield (
                f"{where}.lr: {optimizer.lr:g} is far above what a language model is trained with (1e-7 to 1e-3); it "
                "is the step that Adam takes in every weight"
            )


def _short_run(cfg: RunConfig) -> Iterator[str]:
    if cfg.trains_critic and cfg.critic.warmup_steps >= cfg.train.steps:
        yield (
            f"critic.warmup_steps: {cfg.critic.warmup_steps} of {cfg.train.steps} steps leave none that updates the "
            "policy"
        )
    updates = {"actor.optimizer": cfg.num_actor_updates, "critic.optimizer": cfg.num_critic_updates}
    for where, optimizer in _optimizers(cfg).items():
        num_updates = updates[where]
        if optimizer.warmup_steps >= num_updates > 0:
            yield (
                f"{where}.warmup_steps: the run's {num_updates} optimizer steps (train.steps x train.epochs x "
                f"train.mini_batches) end before these {optimizer.warmup_steps}, below the peak learning rate"
            )


def _critic(cfg: RunConfig, card: ModelCard, critic_card: ModelCard) -> Iterator[str]:
    yield from training_cuts(cfg.parallel, critic_card, owner="critic.path")
    if critic_card.vocab_size < card.vocab_size:
        yield (
            f"critic.path: a vocabulary of {critic_card.vocab_size} does not hold the token ids of model.path "
            f"({card.vocab_size}); use a critic with the same tokenizer"
        )
    if cfg.context_length > critic_card.max_positions:
        yield (
            f"critic.path: its max_position_embeddings ({critic_card.max_positions}) are fewer than a sample may have "
            f"tokens ({cfg.context_length}, rollout.context_length)"
        )
    if cfg.critic.normalize_returns and critic_card.has_value_head:
        yield (
            f"critic.normalize_returns: true cannot go with critic.path {critic_card.path}, a reward model: its values "
            "are rewards, and after the first step would be read as normalised ones; use false"
        )


def _text(cfg: RunConfig, card: ModelCard) -> Iterator[str]:
    if cfg.data.chat_template and card.has_chat_template is False:
        yield (
            f"data.chat_template: true, but the tokenizer in {card.path} has no chat template; for prompts that are "
            "text, set data.chat_template=false"
        )
    outside = [token for token in cfg.rollout.stop_token_ids if token >= card.vocab_size]
    if outside:
        yield f"rollout.stop_token_ids: {outside} lie outside the vocabulary; use ids below {card.vocab_size}"


def _positions(cfg: RunConfig, card: ModelCard) -> Iterator[str]:
    if cfg.context_length > card.max_positions:
        key = "data.max_prompt_tokens + rollout.max_new_tokens"
        if cfg.rollout.context_length is not None:
            key = "rollout.context_length"
        yield f"{key}: {cfg.context_length} exceeds the model's max_position_embeddings ({card.max_positions})"


def is_own_function(name: str) -> bool:
    """Whether `name` reads 'package.module:function'."""
    return _OWN_FUNCTION.match(name) is not None


def _name(key: str, name: str, names: Collection[str]) -> Iterator[str]:
    if name in names or is_own_function(name):
        return
    if refusal := file_refusal(name):
        yield f"{key}: {refusal}"
        return
    is_ours = plain(name) in {plain(one) for one in names}
    elsewhere = None if is_ours else name_elsewhere(key, name)
    hint = did_you_mean(name, names) or f"use {listed(sorted(names))}, or 'package.module:function'"
    yield f"{key}: '{name}' is not known; {elsewhere or hint}"


def _value_at(cfg: RunConfig, key: str) -> str:
    value: object = cfg
    for part in key.split("."):
        value = getattr(value, part)
    assert isinstance(value, str), f"{key} does not hold a name"
    return value


def _engine_parts(cfg: RunConfig) -> Iterator[str]:
    tensor, expert = cfg.rollout.tensor, cfg.rollout.expert
    if tensor % expert:
        yield f"rollout.expert: {expert} does not divide rollout.tensor ({tensor}); use {divisors(tensor)}"
