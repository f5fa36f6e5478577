"""Where a rank's training parameters lie in its memory, in numbers.

In: nothing of its own; `shared_parameters.py` fills it in. Out: storage and offset of a rule's parameter. Pure; must
never import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlmegatron.weight_sync.plan import Ints


@dataclass(frozen=True, slots=True)
class AddressBook:
    """Of each held rule [H], ascending, the storage with its parameter and the first element there."""

    rules: Ints
    storage: Ints
    offset: Ints

    def find(self, rules: Ints) -> tuple[Ints, Ints]:
        """[N] storages and [N] offsets; ValueError for a rule that the rank does not hold."""
        place = np.searchsorted(self.rules, rules)
        known = place < len(self.rules)
        known[known] = self.rules[place[known]] == rules[known]
        if not known.all():
            raise ValueError(
                f"the plan wants parameter {int(rules[~known][0])} from a rank that does not hold it; it was made for "
                "another layout"
            )
        return self.storage[place], self.offset[place]
