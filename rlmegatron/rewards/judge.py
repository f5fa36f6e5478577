"""`Judge` fills in the reward of every sample; a sample whose judgement fails is named, and stops the run or is scored.

In: a resolved `Reward` and groups of samples. Out: the same groups with `reward` and `reward_parts` set. Must never
import torch or hold a collective; each rank judges its own groups.

Where a reward runs: the verifiers of the table take time linear in the response, so they are called here, one after the
other, without a time-out (512 answers: 3 to 30 ms). A regular expression or a user's function can loop for ever, and
neither a thread nor a held GIL can be interrupted; those run in worker processes that are killed when an answer takes
longer than `timeout_s` (512 trivial answers: about 20 ms once the workers are up, which takes a few tenths of a second
and happens once).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, Self

from rlmegatron.rewards.api import RESERVED_PART, Answer, Failure, RewardError, Score
from rlmegatron.rewards.pool import WorkerPool
from rlmegatron.rewards.table import Reward
from rlmegatron.rewards.worker import evaluate
from rlmegatron.types import Prompt, Sample, SampleGroup

RESPONSE_SHOWN = 200
"""Characters of a response that an error message quotes."""


def has_failed(sample: Sample) -> bool:
    """Whether the reward of a judged sample is `error_score`, because its judgement failed (on_error: score)."""
    return sample.reward_parts.get(RESERVED_PART) == 1.0


def count_failures(groups: Iterable[SampleGroup]) -> tuple[int, int]:
    """How many judgements failed, of how many whose failure is counted: none of none with on_error: stop."""
    counted = [one for group in groups for one in group.samples if RESERVED_PART in one.reward_parts]
    return sum(map(has_failed, counted)), len(counted)


class Judge:
    """Judges answers with one reward; keeps its worker processes from step to step, so close it or use `with`.

    timeout_s: longest time one answer may take (ignored by table verifiers other than 'regex', which cannot hang).
    workers: answers judged at the same time, each in a process of its own.
    on_error: 'stop' raises RewardError at the first answer whose judgement raises, times out, ends its process or is
        not a finite number; 'score' gives that answer `error_score` and the part {'error': 1.0}, all others
        {'error': 0.0}; see `has_failed` and `count_failures`.
    """

    def __init__(
        self, reward: Reward, *, timeout_s: float, workers: int, on_error: Literal["stop", "score"], error_score: float
    ) -> None:
        self._reward = reward
        self._pool = None if reward.is_linear else WorkerPool(reward, num_workers=workers, timeout_s=timeout_s)
        self._on_error = on_error
        self._error_score = error_score

    def judge(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """The groups with rewards filled in; raises RewardError that names the prompt, the sample and its data row."""
        pairs = [(group.prompt, sample) for group in groups for sample in group.samples]
        outcomes = self._outcomes([Answer.of(prompt, sample) for prompt, sample in pairs])
        if self._on_error == "stop":
            self._raise_first_failure(pairs, outcomes)
        judged = iter([self._filled(sample, outcome) for (_, sample), outcome in zip(pairs, outcomes, strict=True)])
        return [dataclasses.replace(group, samples=tuple(next(judged) for _ in group.samples)) for group in groups]

    def close(self) -> None:
        """End the worker processes; safe to call twice."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    def _outcomes(self, answers: Sequence[Answer]) -> list[Score | Failure | None]:
        if self._pool is not None:
            return self._pool.judge(answers, stop_at_failure=self._on_error == "stop")
        return [evaluate(self._reward, answer) for answer in answers]

    def _raise_first_failure(
        self, pairs: Iterable[tuple[Prompt, Sample]], outcomes: Iterable[Score | Failure | None]
    ) -> None:
        for (prompt, sample), outcome in zip(pairs, outcomes, strict=True):
            if isinstance(outcome, Failure):
                raise RewardError(self._describe(prompt, sample, outcome))

    def _describe(self, prompt: Prompt, sample: Sample, failure: Failure) -> str:
        reason, _, frames = failure.reason.partition("\n")
        cut = "..." if len(sample.text) > RESPONSE_SHOWN else ""
        message = (
            f"reward {self._reward.name}, prompt {prompt.id} ({prompt.source}), sample {sample.index}: {reason}\n"
            f"  response ({len(sample.token_ids)} tokens, finish reason {sample.finish_reason}): "
            f"{sample.text[:RESPONSE_SHOWN]!r}{cut}"
        )
        return f"{message}\n{frames}" if frames else message

    def _filled(self, sample: Sample, outcome: Score | Failure | None) -> Sample:
        assert outcome is not None, f"sample {sample.index} of prompt {sample.prompt_id} was not judged"
        counts_errors = self._on_error == "score"
        if isinstance(outcome, Failure):
            assert counts_errors, "a failure under on_error='stop' was not raised"
            return dataclasses.replace(sample, reward=self._error_score, reward_parts={RESERVED_PART: 1.0})
        parts = {**outcome.parts, RESERVED_PART: 0.0} if counts_errors else outcome.parts
        return dataclasses.replace(sample, reward=outcome.reward, reward_parts=parts)


def judge(
    reward: Reward,
    groups: Sequence[SampleGroup],
    *,
    timeout_s: float,
    workers: int,
    on_error: Literal["stop", "score"],
    error_score: float,
) -> list[SampleGroup]:
    """One call of a `Judge` that is closed afterwards: for tools and tests; a loop keeps a `Judge` and its workers."""
    with Judge(reward, timeout_s=timeout_s, workers=workers, on_error=on_error, error_score=error_score) as once:
        return once.judge(groups)
