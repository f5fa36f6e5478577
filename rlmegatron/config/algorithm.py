"""The section `algorithm`: how rewards become gradients.

In: plain values from YAML. Out: `AlgorithmConfig`. Must never import torch or any other package of ours; what a name
stands for is in `algorithms/table.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlmegatron.config.advantage_traits import AdvantageTraits, traits_of
from rlmegatron.config.section import Fraction, NonNegativeFloat, Positive, PositiveFloat, Section


class KLConfig(Section):
    """The pull towards the reference model."""

    where: Literal["none", "reward", "loss"] = "none"
    """Charge the divergence per token in the reward, add its mean to the loss, or leave it (and the reference) out."""
    estimator: Literal["k1", "abs", "k2", "k3", "k3_unbiased"] = "k3"
    """Per-token estimator (Schulman 2020): k1 = logp - ref_logp, abs = its absolute value, k2 = its square / 2,
    k3 = exp(-k1) - 1 + k1; k3_unbiased is k3 times the policy ratio, whose gradient is that of the divergence."""
    coef: NonNegativeFloat = 0.001
    """Weight of the divergence; where it starts, when there is a target."""
    target: PositiveFloat | None = None
    """Divergence per token that the weight is adapted to (Ziegler et al. 2019); None leaves the weight as it is."""
    horizon: Positive = 10_000
    """Samples over which an adapted weight may change by a factor of about e^0.2."""


class ImportanceConfig(Section):
    """Correction of the policy loss for the difference between the engine's and the learner's probabilities."""

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Weight each token by its own ratio learner / engine, or by its answer's: the product, or the geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Cut ratios at `high` (truncated importance sampling), or leave out what lies outside [low, high]."""
    high: PositiveFloat = 2.0
    """Largest ratio."""
    low: NonNegativeFloat = 0.5
    """Smallest ratio that is kept; only for mode 'mask'."""


class AlgorithmConfig(Section):
    """How rewards become gradients; names come from rlmegatron/algorithms/table.py or are 'package.module:function'."""

    advantage: str = "grpo"
    """Advantage estimator: 'grpo', 'rloo', 'opo', 'gpg', 'remax', 'reinforce_pp', 'reinforce_pp_baseline', or 'gae',
    that of PPO, which trains a critic."""
    normalize_std: bool = True
    """GRPO: divide by the group's standard deviation; false is Dr. GRPO's advantage."""
    gamma: Fraction = 1.0
    """GAE and REINFORCE++: discount per token."""
    lam: Fraction = 0.95
    """GAE: bias-variance trade-off."""
    whiten: bool | None = None
    """Give the advantages of all tokens of the step mean 0 and standard deviation 1; None: as the estimator's authors
    do (true for 'gae', 'reinforce_pp' and 'reinforce_pp_baseline')."""
    policy_loss: str = "ppo_clip"
    """Policy loss: 'ppo_clip', 'gspo' (ratio of the whole answer), 'cispo' (clipped weight), 'reinforce' (no ratio)."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip distance of the probability ratio: it is not pushed below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Upper clip distance of the probability ratio: it is not pushed above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """PPO: bound on the ratio where the advantage is negative (3 is usual); None turns it off."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """Mean over all tokens of the global mini-batch, or the mean over its answers of each one's mean, sum, or sum over
    aggregation_constant."""
    aggregation_constant: PositiveFloat | None = None
    """What 'seq_mean_token_sum_norm' divides each answer's sum by; None means rollout.max_new_tokens."""
    drop_cut_off: bool = False
    """Over-long filtering: answers cut off at max_new_tokens count nowhere, neither in baselines nor in the loss."""
    importance: ImportanceConfig = ImportanceConfig()
    """Correction for the difference between the engine's and the learner's probabilities."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    value_loss: str = "clipped_value"
    """Value loss of the critic."""
    value_clip: PositiveFloat | None = 0.2
    """Largest move of a value from the one before the update that still earns a gradient; None turns clipping off."""
    kl: KLConfig = KLConfig()
    """Divergence from the reference model."""

    @property
    def traits(self) -> AdvantageTraits:
        """What is known of the advantage estimator."""
        return traits_of(self.advantage)

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the step: as asked, or as the estimator's authors do."""
        return self.traits.is_whitened if self.whiten is None else self.whiten
