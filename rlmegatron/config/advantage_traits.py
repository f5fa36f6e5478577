"""What a run has to know of each advantage estimator before torch is loaded, by the name that a configuration uses.

In: a name. Out: its traits. Must never import any other package of ours; the functions are in `algorithms/table.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdvantageTraits:
    """What an estimator compares a reward with, and what its authors do with the result."""

    uses_group: bool = False
    """Compares with the other answers to the prompt."""
    uses_greedy: bool = False
    """Compares with the most likely answer, which is generated besides."""
    uses_values: bool = False
    """Compares with a critic's values."""
    is_whitened: bool = False
    """Its authors whiten its advantages over the step."""


TRAITS = {
    "grpo": AdvantageTraits(uses_group=True),
    "rloo": AdvantageTraits(uses_group=True),
    "opo": AdvantageTraits(uses_group=True),
    "gpg": AdvantageTraits(uses_group=True),
    "reinforce_pp_baseline": AdvantageTraits(uses_group=True, is_whitened=True),
    "remax": AdvantageTraits(uses_greedy=True),
    "reinforce_pp": AdvantageTraits(is_whitened=True),
    "gae": AdvantageTraits(uses_values=True, is_whitened=True),
}
USERS_OWN = AdvantageTraits()


def traits_of(advantage: str) -> AdvantageTraits:
    """Of a name in the table; a 'package.module:function' has none that are known without importing it."""
    return TRAITS.get(advantage, USERS_OWN)
