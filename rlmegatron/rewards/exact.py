"""The verifier `exact_answer`: the response must equal the reference.

In: an `Answer` whose row holds the reference. Out: 1.0 or 0.0. Must never import torch.
"""

from __future__ import annotations

from rlmegatron.rewards.api import Answer
from rlmegatron.rewards.extract import Place, final_answer


def exact_answer(
    answer: Answer,
    *,
    answer_key: str = "answer",
    take: Place = "whole",
    strip: bool = True,
    ignore_case: bool = False,
    require_stop: bool = False,
) -> float:
    """1.0 if the response equals the reference, else 0.0.

    answer_key: column of the reference: a string, a whole number, or a list of them of which one must match.
    take: what is compared: the whole response, the last \\boxed{}, what follows '####', the last <answer>, or the last
        line.
    strip: ignore white space around both. ignore_case: compare case-folded.
    require_stop: an answer that was cut off before EOS earns 0.0.
    Raises ValueError if the column is missing or holds anything else.
    """
    references = _references(answer.column(answer_key, argument="answer_key"), answer_key)
    if require_stop and answer.finish_reason != "stop":
        return 0.0
    given = final_answer(answer.response, take)
    if given is None:
        return 0.0
    wanted = {_normal(reference, strip=strip, ignore_case=ignore_case) for reference in references}
    return float(_normal(given, strip=strip, ignore_case=ignore_case) in wanted)


def _references(value: object, answer_key: str) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    if not values or not all(isinstance(one, str | int) and not isinstance(one, bool) for one in values):
        raise ValueError(
            f"column {answer_key!r} holds {value!r:.80}; exact_answer needs a string, a whole number or a list of them"
        )
    return [str(one) for one in values]


def _normal(text: str, *, strip: bool, ignore_case: bool) -> str:
    text = text.strip() if strip else text
    return text.casefold() if ignore_case else text
