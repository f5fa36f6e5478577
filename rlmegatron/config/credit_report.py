"""Two parts of `--check`: how answers become gradients, and how the policy is evaluated; what is off is not mentioned.

In: a config whose rules hold, the model's experts, and what functions of the user's own take. Out: rows of a name and
a text, for `report.py` to lay out. Must never import torch, nor guess what a function of the user's own does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlmegatron.config.advantage_traits import TRAITS
from rlmegatron.config.model_card import ExpertSizes
from rlmegatron.config.schema import RunConfig
from rlmegatron.config.wording import as_typed

Row = tuple[str, str]
OwnInputs = Mapping[str, Sequence[str]]
"""Of each function of the user's own, by the key of `algorithm` that names it: the inputs that it takes."""
_IMPORTANCE_OF = {"token": "each token", "sequence": "each answer", "geometric": "each answer (geometric mean)"}


def credit_rows(
    cfg: RunConfig, *, experts: ExpertSizes | None = None, own_inputs: OwnInputs | None = None
) -> list[Row]:
    """From the reward to the loss: what an answer is compared with, what the loss adds up, and what counts nowhere.

    experts: the model's, if it has any. own_inputs: without a function's, only its name is known.
    """
    own = own_inputs or {}
    rows = [
        ("reward", ", ".join(_reward(cfg))),
        ("advantage", ", ".join(_advantage(cfg, own.get("advantage", ())))),
        ("loss", ", ".join(_loss(cfg, own.get("policy_loss", ())))),
        ("value loss", ", ".join(_value_loss(cfg, own.get("value_loss", ())))),
        ("KL", ", ".join(_divergence(cfg))),
        ("importance", ", ".join(_importance(cfg))),
        ("routing", ", ".join(_routing(cfg, experts) if experts else ())),
    ]
    return [*(row for row in rows if row[1]), *_one_below_the_other("left out", _left_out(cfg))]


def evaluation_rows(cfg: RunConfig) -> list[Row]:
    """Which files are evaluated when and from which answers; none where no set is given."""
    found = cfg.eval
    if not found.sets:
        return []
    return [
        *_one_below_the_other("sets", (f"{name}: {path}" for name, path in found.sets.items())),
        ("when", ", ".join(_when(cfg))),
        ("answers", " and ".join(_evaluated_answers(cfg))),
        ("correct", f"from a reward of {found.accuracy_threshold:g}"),
    ]


def _one_below_the_other(name: str, texts: Iterable[str]) -> list[Row]:
    return [("" if number else name, text) for number, text in enumerate(texts)]


def _reward(cfg: RunConfig) -> Iterator[str]:
    yield cfg.reward.name
    if cfg.reward.clip is not None:
        yield f"cut to [{cfg.reward.clip[0]:g}, {cfg.reward.clip[1]:g}]"
    if cfg.reward.whiten:
        yield "whitened over the step"


def _advantage(cfg: RunConfig, own_inputs: Sequence[str]) -> Iterator[str]:
    algorithm = cfg.algorithm
    name = algorithm.advantage
    yield name
    if name in TRAITS:
        yield f"against {_compared_with(cfg)}"
    else:
        costly = {"greedy_rewards": f"the reward of {_greedy_answers(cfg)}", "values": "the critic's values"}
        yield from _given(cfg, [costly.get(key, key) for key in own_inputs])
    if name == "grpo" and algorithm.normalize_std:
        yield "over their standard deviation"
    if name in ("gae", "reinforce_pp") and algorithm.gamma != 1:
        yield f"gamma {algorithm.gamma:g}"
    if name == "gae":
        yield f"lambda {algorithm.lam:g}"
    if algorithm.whitens:
        yield "whitened over the step"


def _compared_with(cfg: RunConfig) -> str:
    traits = cfg.algorithm.traits
    if traits.uses_group:
        return f"the {cfg.rollout.samples_per_prompt} answers to the prompt"
    if traits.uses_greedy:
        return _greedy_answers(cfg)
    return "the critic's values" if traits.uses_values else "no other answer"


def _greedy_answers(cfg: RunConfig) -> str:
    return f"the greedy answer to the prompt ({cfg.rollout.prompts_per_step} more a step)"


def _given(cfg: RunConfig, own_inputs: Sequence[str]) -> Iterator[str]:
    """What a function of the user's own gets, the settings of `algorithm` with their values."""
    settings = cfg.algorithm.model_dump()
    *others, last = [f"{key} {as_typed(settings[key])}" if key in settings else key for key in own_inputs] or [""]
    if last:
        yield f"given {', '.join(others)} and {last}" if others else f"given {last}"


def _loss(cfg: RunConfig, own_inputs: Sequence[str]) -> Iterator[str]:
    algorithm = cfg.algorithm
    name = algorithm.policy_loss
    yield name
    if ":" in name:
        yield from _given(cfg, own_inputs)
    elif name != "reinforce":
        yield f"ratio clipped to [1 - {algorithm.clip_low:g}, 1 + {algorithm.clip_high:g}]"
    if algorithm.dual_clip is not None and name == "ppo_clip":
        yield f"to {algorithm.dual_clip:g} where the advantage is negative"
    constant = algorithm.aggregation_constant or cfg.rollout.max_new_tokens
    over = f" over {constant:g}" if algorithm.aggregation == "seq_mean_token_sum_norm" else ""
    yield algorithm.aggregation + over
    if algorithm.entropy_coef:
        yield f"entropy bonus x {algorithm.entropy_coef:g}"


def _value_loss(cfg: RunConfig, own_inputs: Sequence[str]) -> Iterator[str]:
    if not cfg.trains_critic:
        return
    yield cfg.algorithm.value_loss
    if ":" in cfg.algorithm.value_loss:
        yield from _given(cfg, own_inputs)
    elif cfg.algorithm.value_clip is not None:
        yield f"values clipped to +- {cfg.algorithm.value_clip:g} of the old ones"
    if cfg.critic.normalize_returns:
        yield "returns normalized over the run"


def _divergence(cfg: RunConfig) -> Iterator[str]:
    kl = cfg.algorithm.kl
    if kl.where == "none":
        return
    yield f"{kl.estimator} x {kl.coef:g} in the {kl.where}"
    if kl.target is not None:
        yield f"adapted to {kl.target:g} per token within {kl.horizon:,} samples"


def _importance(cfg: RunConfig) -> Iterator[str]:
    given = cfg.algorithm.importance
    if given.level == "none":
        return
    yield f"probability ratio learner / engine of {_IMPORTANCE_OF[given.level]}"
    yield f"cut at {given.high:g}" if given.mode == "truncate" else f"only within [{given.low:g}, {given.high:g}]"


def _routing(cfg: RunConfig, experts: ExpertSizes) -> Iterator[str]:
    """What is off is named too: an engine and a learner that choose other experts are seen nowhere else."""
    moe = cfg.moe
    chooses = "on (tokens go to the experts that the engine chose)" if moe.router_replay else "off"
    yield f"router replay {chooses}"
    yield "sequence-wise balance loss " + (f"x {moe.aux_loss_coef:g}" if moe.aux_loss_coef else "off")
    if experts.has_bias:
        rate = moe.bias_update_rate
        yield "routing bias " + (f"moved by {rate:g} after each update" if rate else "frozen")


def _left_out(cfg: RunConfig) -> Iterator[str]:
    sampling = cfg.rollout.dynamic_sampling
    if sampling.enabled:
        most = cfg.rollout.prompts_per_step * sampling.max_prompts_ratio
        then = "the run stops" if sampling.on_shortage == "stop" else "those found are trained on"
        yield f"prompts whose answers agree in '{sampling.by}', redrawn: at most {most:,} tried a step, then {then}"
    if cfg.algorithm.drop_cut_off:
        yield f"answers cut off at {cfg.rollout.max_new_tokens:,} tokens"
    if cfg.train.max_kl is not None:
        yield f"a step's further policy updates, once one shows a divergence above {cfg.train.max_kl:g}"


def _when(cfg: RunConfig) -> Iterator[str]:
    if cfg.eval.at_start:
        yield "at the start"
    if 0 < cfg.eval.every < cfg.train.steps:
        yield f"every {cfg.eval.every} steps" if cfg.eval.every > 1 else "every step"
    yield "at the end"


def _evaluated_answers(cfg: RunConfig) -> Iterator[str]:
    found = cfg.eval
    longest = found.max_new_tokens or cfg.rollout.max_new_tokens
    limit = f", of at most {longest:,} tokens" if longest != cfg.rollout.max_new_tokens else ""
    if found.greedy:
        yield "1 greedy" + ("" if found.samples else limit)
    if found.samples:
        temperature, top_p = found.temperature or cfg.rollout.temperature, found.top_p or cfg.rollout.top_p
        nucleus = f", top_p {top_p:g}" if top_p < 1 else ""
        passes = sorted(found.pass_at) or [2**power for power in range(found.samples.bit_length())]
        named = ", ".join([f"avg@{found.samples}", *(f"pass@{k}" for k in passes)])
        yield f"{found.samples} sampled at temperature {temperature:g}{nucleus} ({named}){limit}"
