"""What must hold between an algorithm and the rest of a config, and which legal choices are rarely meant.

In: the config. Out: one line per broken rule, and one per warning. Must never import torch or look at files; rules of
layouts and lengths are in `rules.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rlmegatron.config.advantage_traits import TRAITS
from rlmegatron.config.model_card import ModelCard
from rlmegatron.config.schema import RunConfig
from rlmegatron.config.section import Section
from rlmegatron.config.wording import as_yaml, did_you_mean, listed

_USED_BY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "normalize_std": ("advantage", ("grpo",)),
    "gamma": ("advantage", ("gae", "reinforce_pp")),
    "lam": ("advantage", ("gae",)),
    "clip_low": ("policy_loss", ("ppo_clip", "gspo", "cispo")),
    "clip_high": ("policy_loss", ("ppo_clip", "gspo", "cispo")),
    "dual_clip": ("policy_loss", ("ppo_clip",)),
    "aggregation_constant": ("aggregation", ("seq_mean_token_sum_norm",)),
}
"""Keys of `algorithm` that only some choices read: the key of the choice, and which ones do."""
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""It names a directory of the run, and metrics."""


def algorithm_problems(cfg: RunConfig) -> list[str]:
    """Every broken rule of advantages, losses, sampling, evaluation and routing."""
    return [
        *_groups(cfg),
        *_critic_parts(cfg),
        *_rewards(cfg),
        *_divergence(cfg),
        *_sampling(cfg),
        *_compared_part(cfg),
        *_evaluation(cfg),
        *_replay(cfg),
    ]


def algorithm_warnings(cfg: RunConfig) -> list[str]:
    """Legal choices with an effect that is rarely meant."""
    return [
        *_skewed_sampling(cfg),
        *_idle_parts(cfg),
        *_unread_keys(cfg),
        *_switched_off(cfg),
        *_unusual_ratios(cfg),
        *_against_authors(cfg),
        *_penalty_out_of_reach(cfg),
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
        given = f"critic.enabled: {_shown(cfg.critic.enabled)} is given"
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
    importance = cfg.algorithm.importance
    if importance.level != "none" and importance.mode == "mask" and importance.low > importance.high:
        yield (
            f"algorithm.importance.low: {importance.low:g} is above algorithm.importance.high "
            f"({importance.high:g}); every token would be masked out"
        )


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


def _compared_part(cfg: RunConfig) -> Iterator[str]:
    """Names of the table give a number, 'combine' names its parts; what a function of the user's returns is unknown."""
    by, reward = cfg.rollout.dynamic_sampling.by, cfg.reward
    if not cfg.rollout.dynamic_sampling.enabled or ":" in reward.name or by == "reward":
        return
    parts = [key for key in reward.args if "." not in key.rpartition(":")[2]] if reward.name == "combine" else []
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


def _skewed_sampling(cfg: RunConfig) -> Iterator[str]:
    for name, value, off in (("top_p", cfg.rollout.top_p, 1.0), ("top_k", cfg.rollout.top_k, -1)):
        if value != off:
            yield (
                f"rollout.{name}: {value} cuts the distribution that answers are drawn from, while the learner's "
                f"log-probabilities are those of the whole one: the policy ratio is biased; {off:g} turns it off"
            )


def _idle_parts(cfg: RunConfig) -> Iterator[str]:
    kl = cfg.algorithm.kl
    if kl.where != "none" and kl.coef == 0:
        yield (
            f"algorithm.kl.coef: 0 with algorithm.kl.where '{kl.where}': the reference model is built and scored at "
            "every step, and only reports the divergence"
        )
    if kl.where == "loss" and kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator: 'k1' in the loss reports the divergence without pulling to the reference (the "
            "expectation of its gradient is 0); 'k2' and 'k3' pull"
        )
    for key, value in (("every", cfg.eval.every), ("samples", cfg.eval.samples)):
        if value and not cfg.eval.sets:
            yield f"eval.{key}: {value} has no effect without eval.sets"
    if cfg.train.max_kl is not None and cfg.train.mini_batches * cfg.train.epochs == 1:
        yield (
            f"train.max_kl: {cfg.train.max_kl:g} has no effect with one optimizer step a batch (train.mini_batches x "
            "train.epochs), before which the policy has not moved"
        )
    if cfg.algorithm.clip_low > cfg.algorithm.clip_high:
        yield (
            f"algorithm.clip_low: {cfg.algorithm.clip_low:g} is wider than algorithm.clip_high "
            f"({cfg.algorithm.clip_high:g}), which lets probabilities fall faster than they rise"
        )


def _unusual_ratios(cfg: RunConfig) -> Iterator[str]:
    algorithm, updates = cfg.algorithm, cfg.train.mini_batches * cfg.train.epochs
    if algorithm.policy_loss == "gspo" and algorithm.clip_high > 0.05:
        yield (
            f"algorithm.clip_high: {algorithm.clip_high:g} hardly ever binds for the ratio of a whole answer ('gspo'), "
            "whose authors use 4e-4 (and clip_low 3e-4)"
        )
    if algorithm.policy_loss == "reinforce" and updates > 1:
        yield (
            f"algorithm.policy_loss: 'reinforce' has no ratio to correct for the {updates} optimizer steps that a "
            "rollout batch is used for (train.mini_batches x train.epochs); all but the first are off-policy"
        )


def _unread_keys(cfg: RunConfig) -> Iterator[str]:
    given, chosen = _changed(cfg.algorithm), cfg.algorithm.model_dump()
    for key, (choice, readers) in _USED_BY.items():
        name = chosen[choice]
        # A function of the user's own may read any of them.
        if key in given and name not in readers and ":" not in name:
            yield f"algorithm.{key}: {_shown(given[key])} has no effect on {choice} '{name}'"
    if not cfg.trains_critic:
        yield from (
            f"algorithm.{key}: {_shown(given[key])} has no effect without a critic"
            for key in ("value_loss", "value_clip")
            if key in given
        )
        if cfg.critic.optimizer != type(cfg.critic)().optimizer:
            yield "critic.optimizer: has no effect without a critic"


def _switched_off(cfg: RunConfig) -> Iterator[str]:
    kl, importance, sampling = cfg.algorithm.kl, cfg.algorithm.importance, cfg.rollout.dynamic_sampling
    idle: list[tuple[str, Section, tuple[str, ...], str]] = []
    if kl.where == "none":
        idle.append(("algorithm.kl", kl, ("estimator", "coef", "horizon"), "algorithm.kl.where is 'none'"))
    elif kl.target is None:
        idle.append(("algorithm.kl", kl, ("horizon",), "algorithm.kl.target is null"))
    if importance.level == "none":
        every = ("mode", "high", "low")
        idle.append(("algorithm.importance", importance, every, "algorithm.importance.level is 'none'"))
    elif importance.mode == "truncate":
        idle.append(("algorithm.importance", importance, ("low",), "algorithm.importance.mode is 'truncate'"))
    if not sampling.enabled:
        every = ("by", "max_prompts_ratio", "on_shortage")
        idle.append(("rollout.dynamic_sampling", sampling, every, "rollout.dynamic_sampling.enabled is false"))
    for section, settings, keys, why in idle:
        given = _changed(settings)
        yield from (f"{section}.{key}: {_shown(given[key])} has no effect while {why}" for key in keys if key in given)


def _against_authors(cfg: RunConfig) -> Iterator[str]:
    algorithm, updates = cfg.algorithm, cfg.train.mini_batches * cfg.train.epochs
    if algorithm.advantage == "opo" and updates > 1:
        yield (
            f"algorithm.advantage: 'opo' has the best baseline for exactly one optimizer step a batch, not for "
            f"{updates} (train.mini_batches x train.epochs)"
        )
    if algorithm.policy_loss == "gspo" and algorithm.aggregation != "seq_mean_token_mean":
        yield (
            f"algorithm.aggregation: '{algorithm.aggregation}' weighs the ratios of 'gspo' by the lengths of their "
            "answers, where its authors use 'seq_mean_token_mean'"
        )
    if cfg.rollout.dynamic_sampling.enabled and algorithm.advantage in TRAITS and not algorithm.traits.uses_group:
        yield (
            f"rollout.dynamic_sampling.enabled: true drops groups whose rewards are equal, from which "
            f"algorithm.advantage '{algorithm.advantage}' would learn: it does not compare within a group"
        )
    if algorithm.advantage in ("opo", "gpg") and algorithm.kl.where != "none":
        yield f"algorithm.kl.where: '{algorithm.kl.where}', where the authors of '{algorithm.advantage}' use 'none'"


def _penalty_out_of_reach(cfg: RunConfig) -> Iterator[str]:
    prefix = {"overlong": "", "combine": "overlong."}.get(cfg.reward.name)
    if prefix is None:
        return
    longest, buffer = (cfg.reward.args.get(f"{prefix}{key}") for key in ("max_tokens", "buffer_tokens"))
    if isinstance(longest, int) and isinstance(buffer, int) and longest - buffer >= cfg.rollout.max_new_tokens:
        yield (
            f"reward.args.{prefix}max_tokens: {longest} charges answers above {longest - buffer} tokens, but none is "
            f"longer than rollout.max_new_tokens ({cfg.rollout.max_new_tokens}): the penalty is always 0"
        )


def _changed(section: Section) -> dict[str, object]:
    """The values that differ from the defaults; which keys were given says less, as a resolved config has them all."""
    usual = type(section)().model_dump()
    return {key: value for key, value in section.model_dump().items() if value != usual[key]}


def _shown(value: object) -> str:
    """Numbers as short as they were typed: a float that was given as 3 has become 3.0."""
    return f"{value:g}" if isinstance(value, float) else as_yaml(value)
