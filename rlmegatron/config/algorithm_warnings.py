"""Choices of an algorithm that are legal and rarely meant.

In: a config. Out: one line per warning. Must never import torch or look at files; settings that nothing reads are in
`settings_without_effect.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmegatron.config.advantage_traits import TRAITS
from rlmegatron.config.algorithm_rules import combined_weights
from rlmegatron.config.schema import RunConfig

_FROM_0_TO_1 = ("exact_answer", "numeric_answer", "regex", "format")
"""Rewards of the table that are 0 or 1."""


def algorithm_warnings(cfg: RunConfig) -> list[str]:
    """One line for each choice with an effect that is rarely meant."""
    return [
        *_skewed_sampling(cfg),
        *_weak_divergence(cfg),
        *_unusual_ratios(cfg),
        *_against_authors(cfg),
        *_rewards(cfg),
        *_penalty_out_of_reach(cfg),
    ]


def _skewed_sampling(cfg: RunConfig) -> Iterator[str]:
    for name, value, off in (("top_p", cfg.rollout.top_p, 1.0), ("top_k", cfg.rollout.top_k, -1)):
        if value != off:
            yield (
                f"rollout.{name}: {value} cuts the distribution that answers are drawn from, while the learner's "
                f"log-probabilities are those of the whole one: the policy ratio is biased; {off:g} turns it off"
            )


def _weak_divergence(cfg: RunConfig) -> Iterator[str]:
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


def _unusual_ratios(cfg: RunConfig) -> Iterator[str]:
    algorithm, updates = cfg.algorithm, cfg.train.mini_batches * cfg.train.epochs
    # The authors of cispo leave out the lower bound; of a distance of 1 or more ppo_clip's own warning says enough.
    is_compared = algorithm.policy_loss == "gspo" or (algorithm.policy_loss == "ppo_clip" and algorithm.clip_low < 1)
    if is_compared and algorithm.clip_low > algorithm.clip_high:
        yield (
            f"algorithm.clip_low: {algorithm.clip_low:g} is wider than algorithm.clip_high "
            f"({algorithm.clip_high:g}), which lets probabilities fall faster than they rise"
        )
    if algorithm.policy_loss == "ppo_clip":
        for key, distance, result in (
            ("clip_low", algorithm.clip_low, "has no lower bound"),
            ("clip_high", algorithm.clip_high, f"may rise to {1 + algorithm.clip_high:g}"),
        ):
            if distance >= 1:
                yield (
                    f"algorithm.{key}: {distance:g} is a distance from 1, not a bound of the ratio, which then "
                    f"{result}; 0.2 is usual"
                )
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
    loss = algorithm.policy_loss
    if algorithm.advantage == "gpg" and loss != "reinforce" and ":" not in loss and updates > 1:
        yield f"algorithm.policy_loss: '{loss}', where the authors of 'gpg' use 'reinforce'"
    if algorithm.advantage in ("opo", "gpg") and algorithm.kl.where != "none":
        yield f"algorithm.kl.where: '{algorithm.kl.where}', where the authors of '{algorithm.advantage}' use 'none'"


def _rewards(cfg: RunConfig) -> Iterator[str]:
    weights = {name: value for name, value in combined_weights(cfg.reward).items() if isinstance(value, int | float)}
    if weights and not any(weights.values()):
        yield "reward.args: every weight is 0: all answers earn the same, and there is nothing to learn"
    penalty = weights.get("overlong", 0)
    if penalty < 0:
        yield (
            f"reward.args.overlong: {penalty:g} is a bonus on over-long answers: what it multiplies is a penalty, from "
            "-1 to 0; use a weight above 0"
        )
    threshold = cfg.eval.accuracy_threshold
    if cfg.reward.on_error == "score" and cfg.reward.error_score >= threshold:
        yield (
            f"reward.error_score: {cfg.reward.error_score:g} is at least eval.accuracy_threshold ({threshold:g}): "
            "answers whose judgement failed count as correct"
        )
    if cfg.reward.name in _FROM_0_TO_1 and not 0 < threshold <= 1:
        counts = "no answer counts" if threshold > 1 else "every answer counts"
        yield (
            f"eval.accuracy_threshold: {threshold:g}, while the reward '{cfg.reward.name}' is 0 or 1: {counts} as "
            "correct"
        )


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
