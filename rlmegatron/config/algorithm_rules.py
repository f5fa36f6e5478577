"""What must hold between an algorithm and the rest of a config, and which legal choices are rarely meant.

In: the config. Out: one line per broken rule, and one per warning. Must never import torch or look at files; rules of
layouts and lengths are in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmegatron.config.cuts import listed
from rlmegatron.config.model_card import ModelCard
from rlmegatron.config.schema import RunConfig

_GROUP_ADVANTAGES = ("grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline")


def algorithm_problems(cfg: RunConfig) -> list[str]:
    """Every broken rule of advantages, losses, sampling, evaluation and routing."""
    return [
        *_groups(cfg),
        *_critic_parts(cfg),
        *_rewards(cfg),
        *_divergence(cfg),
        *_sampling(cfg),
        *_evaluation(cfg),
        *_replay(cfg),
    ]


def algorithm_warnings(cfg: RunConfig) -> list[str]:
    """Legal choices with an effect that is rarely meant."""
    return [*_skewed_sampling(cfg), *_idle_parts(cfg), *_unusual_ratios(cfg)]


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
    if advantage in _GROUP_ADVANTAGES and samples < 2:
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
    if cfg.trains_critic:
        return
    why = f"but algorithm.advantage '{cfg.algorithm.advantage}' trains no critic; remove it, or use 'gae'"
    if cfg.critic.warmup_steps:
        yield f"critic.warmup_steps: {cfg.critic.warmup_steps} is given, {why}"
    if cfg.critic.path is not None:
        yield f"critic.path: {cfg.critic.path} is given, {why}"
    if cfg.critic.normalize_returns:
        yield f"critic.normalize_returns: true is given, {why}"


def _rewards(cfg: RunConfig) -> Iterator[str]:
    clip = cfg.reward.clip
    if clip is not None and clip[0] >= clip[1]:
        yield f"reward.clip: [{clip[0]:g}, {clip[1]:g}] is empty; the first bound must be below the second"
    if cfg.reward.whiten and cfg.algorithm.advantage == "remax":
        yield (
            "reward.whiten: true cannot go with algorithm.advantage 'remax', which compares with the reward of another "
            "answer; use algorithm.whiten, which acts on advantages"
        )


def _divergence(cfg: RunConfig) -> Iterator[str]:
    kl = cfg.algorithm.kl
    if kl.target is not None and kl.where == "none":
        yield f"algorithm.kl.target: {kl.target:g} needs algorithm.kl.where 'reward' or 'loss'; it is 'none'"
    if kl.target is not None and kl.coef == 0:
        yield f"algorithm.kl.coef: 0 cannot be adapted to algorithm.kl.target ({kl.target:g}); use a number above 0"
    if kl.target is not None and kl.estimator == "k1":
        yield (
            "algorithm.kl.target: the estimate by algorithm.kl.estimator 'k1' may be negative, which no target can be; "
            "use 'k2' or 'k3'"
        )
    samples = cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt
    if kl.target is not None and kl.horizon <= 0.2 * samples:
        yield (
            f"algorithm.kl.horizon: {kl.horizon} is too short for {samples} samples a step, which could turn the "
            f"weight negative; use at least {samples}"
        )
    importance = cfg.algorithm.importance
    if importance.level != "none" and importance.mode == "mask" and importance.low >= importance.high:
        yield (
            f"algorithm.importance.low: {importance.low:g} is not below algorithm.importance.high "
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


def _evaluation(cfg: RunConfig) -> Iterator[str]:
    found = cfg.eval
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
    if cfg.eval.every and not cfg.eval.sets:
        yield f"eval.every: {cfg.eval.every} has no effect without eval.sets"
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
    if algorithm.dual_clip is not None and algorithm.policy_loss != "ppo_clip":
        yield f"algorithm.dual_clip: {algorithm.dual_clip:g} has no effect on policy_loss '{algorithm.policy_loss}'"
    if algorithm.aggregation_constant is not None and algorithm.aggregation != "seq_mean_token_sum_norm":
        yield (
            f"algorithm.aggregation_constant: {algorithm.aggregation_constant:g} has no effect on aggregation "
            f"'{algorithm.aggregation}'"
        )
