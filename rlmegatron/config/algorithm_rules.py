"""What must hold between an algorithm and the rest of a config.

In: the config. Out: one line per broken rule. Must never import torch or look at files; rules of layouts and lengths
are in `rules.py`, choices that are legal but rarely meant in `algorithm_warnings.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlmegatron.config.advantage_traits import TRAITS
from rlmegatron.config.model_card import ModelCard
from rlmegatron.config.schema import RewardConfig, RunConfig
from rlmegatron.config.wording import as_typed, did_you_mean, listed

_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""It names a directory of the run, and metrics."""


def algorithm_problems(cfg: RunConfig) -> list[str]:
    """Every broken rule of advantages, losses, sampling, evaluation and routing."""
    return [
        *_groups(cfg),
        *_critic_parts(cfg),
        *_rewards(cfg),
        *_divergence(cfg),
        *_importance(cfg),
        *_sampling(cfg),
        *_compared_part(cfg),
        *_evaluation(cfg),
        *_replay(cfg),
    ]


def expert_problems(cfg: RunConfig, card: ModelCard) -> Iterator[str]:
    """Settings of `moe` that the model has nothing for."""
    given = {name: value for name, value in cfg.moe.model_dump().items() if value}
    if card.experts is None:
        for name, value in given.items():
            shown = "true" if value is True else f"{value:g}"
            yield f"moe.{name}: {shown} is given, but {card.path} has no experts; remove it"
    elif cfg.moe.bias_update_rate and not card.experts.has_bias:
        yield (
            f"moe.bias_update_rate: {cfg.moe.bias_update_rate:g} needs a router with a bias, as DeepSeek-V3's; "
            f"{card.path} has none; use 0, or moe.aux_loss_coef"
        )


def _replay(cfg: RunConfig) -> Iterator[str]:
    chunk = cfg.rollout.engine_args.get("chunked_prefill_size")
    if cfg.moe.router_replay and isinstance(chunk, int) and chunk <= 0:
        yield (
            f"rollout.engine_args.chunked_prefill_size: {chunk} cannot go with moe.router_replay: the engine keeps the "
            "experts of one chunk at a time; use a number above 0, or remove it"
        )


def _groups(cfg: RunConfig) -> Iterator[str]:
    advantage, samples = cfg.algorithm.advantage, cfg.rollout.samples_per_prompt
    if cfg.algorithm.traits.uses_group and samples < 2:
        yield (
            f"rollout.samples_per_prompt: 1 leaves algorithm.advantage '{advantage}' no group to compare with (every "
            "advantage would be 0); use at least 2"
        )
    if cfg.rollout.dynamic_sampling.enabled and samples < 2:
        yield (
            "rollout.dynamic_sampling.enabled: true needs answers to compare, but rollout.samples_per_prompt is 1; use "
            "at least 2"
        )


def _critic_parts(cfg: RunConfig) -> Iterator[str]:
    advantage, uses_values = cfg.algorithm.advantage, cfg.algorithm.traits.uses_values
    if advantage in TRAITS and cfg.critic.enabled not in (None, uses_values):
        does = "needs a critic" if uses_values else "has no use for one"
        given = f"critic.enabled: {as_typed(cfg.critic.enabled)} is given"
        yield f"{given}, but algorithm.advantage '{advantage}' {does}; remove it"
    if cfg.trains_critic:
        return
    instead = "use 'gae'" if advantage in TRAITS else "set critic.enabled: true"
    why = f"but algorithm.advantage '{advantage}' trains no critic; remove it, or {instead}"
    if cfg.critic.warmup_steps:
        yield f"critic.warmup_steps: {cfg.critic.warmup_steps} is given, {why}"
    if cfg.critic.epochs is not None:
        yield f"critic.epochs: {cfg.critic.epochs} is given, {why}"
    if cfg.critic.path is not None:
        yield f"critic.path: {cfg.critic.path} is given, {why}"
    if cfg.critic.normalize_returns:
        yield f"critic.normalize_returns: true is given, {why}"


def _rewards(cfg: RunConfig) -> Iterator[str]:
    clip = cfg.reward.clip
    if clip is not None and clip[0] >= clip[1]:
        yield f"reward.clip: [{clip[0]:g}, {clip[1]:g}] is empty; the first bound must be below the second"
    if cfg.algorithm.traits.uses_greedy:
        yield from whitened_beside_greedy(cfg)


def whitened_beside_greedy(cfg: RunConfig) -> Iterator[str]:
    """Of an advantage that takes the reward of the greedy answer, which is not among those that are whitened."""
    if cfg.reward.whiten:
        yield (
            f"reward.whiten: true cannot go with algorithm.advantage '{cfg.algorithm.advantage}', which compares with "
            "the reward of another answer; use algorithm.whiten, which acts on advantages"
        )


def _divergence(cfg: RunConfig) -> Iterator[str]:
    kl = cfg.algorithm.kl
    if kl.target is not None and kl.where == "none":
        yield f"algorithm.kl.target: {kl.target:g} needs algorithm.kl.where 'reward' or 'loss'; it is 'none'"
    if kl.target is not None and kl.coef == 0:
        yield f"algorithm.kl.coef: 0 cannot be adapted to algorithm.kl.target ({kl.target:g}); use a number above 0"
    samples = cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt
    if kl.target is not None and kl.horizon <= 0.2 * samples:
        yield (
            f"algorithm.kl.horizon: {kl.horizon} is too short for {samples} samples a step, which could turn the "
            f"weight negative; use at least {samples}"
        )


def _importance(cfg: RunConfig) -> Iterator[str]:
    """At most tokens the ratio is near 1, on either side."""
    given = cfg.algorithm.importance
    if given.level == "none":
        return
    agreement = "1, the ratio of tokens on which engine and learner agree"
    if given.mode == "truncate" and given.high < 1:
        yield f"algorithm.importance.high: {given.high:g} is below {agreement}; use at least 1"
    if given.mode == "mask" and given.high <= 1:
        yield f"algorithm.importance.high: {given.high:g} leaves no room above {agreement}; use a number above 1"
    if given.mode == "mask" and given.low >= 1:
        yield f"algorithm.importance.low: {given.low:g} leaves no room below {agreement}; use a number below 1"


def _sampling(cfg: RunConfig) -> Iterator[str]:
    if cfg.rollout.temperature == 0:
        yield (
            "rollout.temperature: 0 always gives the most likely answer: all answers to a prompt would be equal, and "
            "the policy that drew them has no log-probabilities to learn from; use a number above 0 (evaluation is "
            "greedy by itself)"
        )
    if cfg.rollout.top_k != -1 and cfg.rollout.top_k < 1:
        yield f"rollout.top_k: {cfg.rollout.top_k} is not allowed; use at least 1, or -1 to turn it off"
    if any(token < 0 for token in cfg.rollout.stop_token_ids):
        yield f"rollout.stop_token_ids: {list(cfg.rollout.stop_token_ids)} holds a negative id"


def combined_weights(reward: RewardConfig) -> dict[str, object]:
    """The parts of 'combine' with their weights, which are not checked yet; none of another reward."""
    if reward.name != "combine":
        return {}
    return {key: value for key, value in reward.args.items() if "." not in key.rpartition(":")[2]}


def _compared_part(cfg: RunConfig) -> Iterator[str]:
    """Names of the table give a number, 'combine' names its parts; what a function of the user's returns is unknown."""
    sampling, reward = cfg.rollout.dynamic_sampling, cfg.reward
    by = sampling.by
    if not sampling.enabled or by == "reward":
        return
    if by == "error":
        yield "rollout.dynamic_sampling.by: 'error' is whether a judgement failed, and no part to compare answers by"
        return
    if ":" in reward.name:
        return
    parts = list(combined_weights(reward))
    if by in parts or any(":" in part and by.startswith(f"{part}.") for part in parts):
        return
    hint = did_you_mean(by, parts) or f"use {listed(['reward', *parts])}"
    yield f"rollout.dynamic_sampling.by: the reward '{reward.name}' has no part '{by}'; {hint}"


def _evaluation(cfg: RunConfig) -> Iterator[str]:
    found = cfg.eval
    for name in found.sets:
        if not _SET_NAME.fullmatch(name):
            yield f"eval.sets: {name!r} cannot name a set; use letters, digits, '.', '_', '-', first a letter or digit"
    if found.sets and not found.greedy and not found.samples:
        yield "eval.greedy: false with eval.samples 0 leaves nothing to evaluate; use one of the two, or no eval.sets"
    too_large = [k for k in found.pass_at if k > found.samples]
    if too_large:
        yield (
            f"eval.pass_at: {listed([str(k) for k in too_large])} of {found.samples} answers (eval.samples) cannot be "
            "drawn; use at most eval.samples"
        )
    longest = found.max_new_tokens
    if longest is not None and cfg.context_length < cfg.data.max_prompt_tokens + longest:
        yield (
            f"eval.max_new_tokens: {longest} and data.max_prompt_tokens ({cfg.data.max_prompt_tokens}) exceed "
            f"rollout.context_length ({cfg.context_length}); raise that"
        )
