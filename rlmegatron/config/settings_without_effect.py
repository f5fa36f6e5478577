"""Settings that differ from their defaults though nothing reads them: another one turns them off.

In: a config. Out: one line per setting. Must never import torch or look at files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlmegatron.config.schema import RunConfig
from rlmegatron.config.section import Section
from rlmegatron.config.wording import as_typed

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
_Idle = tuple[str, Section, tuple[str, ...], str]
"""The path of a section, its values, keys of it that nothing reads, and why."""


def settings_without_effect(cfg: RunConfig) -> list[str]:
    """One line for each that was changed in vain."""
    return [*_idle_parts(cfg), *_beyond_the_run(cfg), *_unread_keys(cfg), *_switched_off(cfg)]


def _idle_parts(cfg: RunConfig) -> Iterator[str]:
    for key, value in (("every", cfg.eval.every), ("samples", cfg.eval.samples)):
        if value and not cfg.eval.sets:
            yield f"eval.{key}: {value} has no effect without eval.sets"
    if cfg.train.max_kl is not None and cfg.train.mini_batches * cfg.train.epochs == 1:
        yield (
            f"train.max_kl: {cfg.train.max_kl:g} has no effect with one optimizer step a batch (train.mini_batches x "
            "train.epochs), before which the policy has not moved"
        )


def _beyond_the_run(cfg: RunConfig) -> Iterator[str]:
    """The end of a run is evaluated and saved whatever the interval."""
    last = f"is more than train.steps ({cfg.train.steps}):"
    if cfg.eval.sets and cfg.eval.every > cfg.train.steps:
        when = "at the start and the end" if cfg.eval.at_start else "at the end"
        yield f"eval.every: {cfg.eval.every} {last} the policy is evaluated only {when}"
    if cfg.checkpoint.every > cfg.train.steps:
        yield f"checkpoint.every: {cfg.checkpoint.every} {last} the run is saved only at its end"


def _unread_keys(cfg: RunConfig) -> Iterator[str]:
    given, chosen = _changed(cfg.algorithm), cfg.algorithm.model_dump()
    for key, (choice, readers) in _USED_BY.items():
        name = chosen[choice]
        # A function of the user's own may read any of them.
        if key in given and name not in readers and ":" not in name:
            yield f"algorithm.{key}: {as_typed(given[key])} has no effect on {choice} '{name}'"
    if not cfg.trains_critic:
        yield from (
            f"algorithm.{key}: {as_typed(given[key])} has no effect without a critic"
            for key in ("value_loss", "value_clip")
            if key in given
        )
        if cfg.critic.optimizer != type(cfg.critic)().optimizer:
            yield "critic.optimizer: has no effect without a critic"


def _switched_off(cfg: RunConfig) -> Iterator[str]:
    for where, section, keys, why in (*_switched_off_learning(cfg), *_switched_off_elsewhere(cfg)):
        given = _changed(section)
        yield from (f"{where}.{key}: {as_typed(given[key])} has no effect while {why}" for key in keys if key in given)


def _switched_off_learning(cfg: RunConfig) -> Iterator[_Idle]:
    kl, importance, sampling = cfg.algorithm.kl, cfg.algorithm.importance, cfg.rollout.dynamic_sampling
    if kl.where == "none":
        yield "algorithm.kl", kl, ("estimator", "coef", "horizon"), "algorithm.kl.where is 'none'"
    elif kl.target is None:
        yield "algorithm.kl", kl, ("horizon",), "algorithm.kl.target is null"
    if importance.level == "none":
        yield "algorithm.importance", importance, ("mode", "high", "low"), "algorithm.importance.level is 'none'"
    elif importance.mode == "truncate":
        yield "algorithm.importance", importance, ("low",), "algorithm.importance.mode is 'truncate'"
    if not sampling.enabled:
        every = ("by", "max_prompts_ratio", "on_shortage")
        yield "rollout.dynamic_sampling", sampling, every, "rollout.dynamic_sampling.enabled is false"


def _switched_off_elsewhere(cfg: RunConfig) -> Iterator[_Idle]:
    optimizers = {"actor.optimizer": cfg.actor.optimizer}
    if cfg.trains_critic:
        optimizers["critic.optimizer"] = cfg.critic.optimizer
    for where, optimizer in optimizers.items():
        if optimizer.schedule == "constant":
            yield where, optimizer, ("min_lr",), f"{where}.schedule is 'constant'"
    if not cfg.eval.samples:
        yield "eval", cfg.eval, ("temperature", "top_p"), "eval.samples is 0"
    if cfg.reward.on_error == "stop":
        yield "reward", cfg.reward, ("error_score",), "reward.on_error is 'stop'"
    if not cfg.checkpoint.export:
        yield "checkpoint", cfg.checkpoint, ("export_dtype",), "checkpoint.export is false"


def _changed(section: Section) -> dict[str, object]:
    """The values that differ from the defaults; which keys were given says less, as a resolved config has them all."""
    usual = type(section)().model_dump()
    return {key: value for key, value in section.model_dump().items() if value != usual[key]}
