"""The digit-sorting task of the quickstart: problems, their split into train and held-out, and imperfect labels.

In: a seeded `random.Random`. Out: rows `{"prompt": "31431=", "answer": "11334"}`. Must never import torch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Variant:
    """One version of the task: which lengths occur, and how often a warm-up label of each length has a random slip."""

    slip_rates: Mapping[int, float]
    """Number of digits to the share of labels with a slip; its keys are the lengths, drawn with equal frequency."""
    dedupe_rate: float
    """Share of the warm-up labels in which repeated digits are dropped: the wrong habit that RL has to undo."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of digits a problem can have."""
        return tuple(self.slip_rates)

    @property
    def max_new_tokens(self) -> int:
        """Longest right answer in tokens, EOS included."""
        return max(self.lengths) + 1


VARIANTS = {
    "sort5": Variant(slip_rates={5: 0.1}, dedupe_rate=0.6),
    "mixed": Variant(slip_rates={3: 0.0, 4: 0.05, 6: 0.5, 7: 0.6}, dedupe_rate=0.5),
}


def answer(digits: str) -> str:
    """The digits in ascending order."""
    return "".join(sorted(digits))


def is_held_out(digits: str) -> bool:
    """Whether a problem belongs to the test set, decided by its answer: no test answer is a training answer."""
    bucket = int.from_bytes(hashlib.sha256(answer(digits).encode()).digest()[:8], "big")
    return bucket < HELD_OUT_SHARE * 2**64


def draw_digits(rng: random.Random, variant: Variant, *, held_out: bool) -> str:
    """One problem of the asked side of the split: a length of the variant, then uniform digits."""
    while True:
        digits = "".join(rng.choices("0123456789", k=rng.choice(variant.lengths)))
        if is_held_out(digits) == held_out:
            return digits


def draw_distinct(rng: random.Random, variant: Variant, num_problems: int, *, held_out: bool) -> list[str]:
    """`num_problems` different problems; it must be well below the number that exist, or this never returns."""
    drawn: dict[str, None] = {}
    while len(drawn) < num_problems:
        drawn[draw_digits(rng, variant, held_out=held_out)] = None
    return list(drawn)


def row(digits: str) -> dict[str, str]:
    """The data row of a problem."""
    return {"prompt": f"{digits}=", "answer": answer(digits)}


def warmup_label(rng: random.Random, variant: Variant, digits: str) -> str:
    """A label of the warm-up: repeats dropped (`31431` -> `134`), a random slip, or right, at the variant's rates.

    A model trained on them learns the format and the right answer as one mode among several, so that RL has something
    to choose from; on right labels alone it would either know the task or have nothing to reinforce.
    """
    u = rng.random()
    if u < variant.dedupe_rate:
        return "".join(sorted(set(digits)))
    if u < variant.dedupe_rate + variant.slip_rates[len(digits)]:
        return _with_slip(rng, answer(digits))
    return answer(digits)


def _with_slip(rng: random.Random, digits: str) -> str:
    """Two neighbours swapped, and in half of the cases one digit overwritten."""
    slipped = list(digits)
    i = rng.randrange(len(slipped) - 1)
    slipped[i], slipped[i + 1] = slipped[i + 1], slipped[i]
    if rng.random() < 0.5:
        slipped[rng.randrange(len(slipped))] = rng.choice("0123456789")
    return "".join(slipped)
