"""Acting: the judged groups that a step learns from, under dynamic sampling only those whose answers differ.

In: a run whose engines serve. Out: groups on the engines' lead ranks, and a tally that is the same on every rank. Must
never touch the learner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmegatron.config.schema import RunConfig
from rlmegatron.metrics.log import StepLog
from rlmegatron.metrics.values import Last, Mean, Metric
from rlmegatron.rewards.api import RESERVED_PART
from rlmegatron.rewards.judge import count_failures, has_failed
from rlmegatron.rollout.api import SamplingConfig
from rlmegatron.trainer.batch import is_cut_off
from rlmegatron.trainer.collect import judge
from rlmegatron.trainer.hand_over import generate_or_recover
from rlmegatron.trainer.run import Run
from rlmegatron.types import Prompt, Sample, SampleGroup

Range = tuple[float, float]
"""Smallest and largest value within a group of what dynamic sampling compares."""


@dataclass(frozen=True)
class Tally:
    """What became of the prompts of a step."""

    tried: int = 0
    kept: int = 0
    low: int = 0
    """Groups that agree on a value below `eval.accuracy_threshold`."""
    high: int = 0
    """Groups that agree on a value of at least that."""
    surplus: int = 0
    """Groups that differ, but were drawn beyond what was needed."""

    def next_draw(self, *, wanted: int, budget: int) -> int:
        """How many prompts to try next: as many as the share that differed so far promises to be enough."""
        missing = wanted - self.kept
        share = self.kept / self.tried if self.tried else 1.0
        likely = math.ceil(missing / share) if share else wanted
        return min(max(missing, min(likely, wanted)), budget - self.tried)

    def metrics(self) -> dict[str, Metric]:
        """For the step's row."""
        return {
            "dynamic_sampling/prompts_tried": Last(self.tried),
            "dynamic_sampling/differ": Last((self.kept + self.surplus) / self.tried),
            "dynamic_sampling/all_low": Last(self.low / self.tried),
            "dynamic_sampling/all_high": Last(self.high / self.tried),
        }


class Shortage(Exception):
    """Raised alike on every rank: the budget of dynamic sampling is spent and too few groups differ."""


def act(run: Run, log: StepLog, step: int) -> list[SampleGroup]:
    """Collective; this rank's part of the judged groups of `step`. Raises Shortage."""
    if not run.cfg.rollout.dynamic_sampling.enabled:
        return _judged(run, log, step, run.cfg.rollout.prompts_per_step)
    return _differing(run, log, step)


def _differing(run: Run, log: StepLog, step: int) -> list[SampleGroup]:
    """Groups whose answers differ, the first ones in the order of drawing; what is drawn beyond them is left out."""
    settings, wanted = run.cfg.rollout.dynamic_sampling, run.cfg.rollout.prompts_per_step
    budget = settings.max_prompts_ratio * wanted
    kept: list[SampleGroup] = []
    tally = Tally()
    while tally.kept < wanted and tally.tried < budget:
        groups = _judged(run, log, step, tally.next_draw(wanted=wanted, budget=budget))
        ranges = run.world.collect("dynamic sampling", lambda: _ranges(run.cfg, groups))  # noqa: B023
        everywhere = {prompt_id: found for part in ranges for prompt_id, found in part.items()}
        tally, chosen = choose(tally, everywhere, wanted=wanted, threshold=run.cfg.eval.accuracy_threshold)
        kept += [group for group in groups if group.prompt.id in chosen]
    log.add(tally.metrics() if run.world.is_lead else {})
    if tally.kept < wanted:
        report = _report_shortage(run, step, tally)
        if settings.on_shortage == "stop":
            raise Shortage(report)
        run.say(report)
    return kept


def choose(tally: Tally, ranges: Mapping[int, Range], *, wanted: int, threshold: float) -> tuple[Tally, frozenset[int]]:
    """The tally with a round's groups (by prompt id) counted, and the ids of those that are kept."""
    differing = sorted(prompt_id for prompt_id, (low, high) in ranges.items() if low != high)
    chosen = differing[: wanted - tally.kept]
    equal = [low for low, high in ranges.values() if low == high]
    high = sum(value >= threshold for value in equal)
    return dataclasses.replace(
        tally,
        tried=tally.tried + len(ranges),
        kept=tally.kept + len(chosen),
        low=tally.low + len(equal) - high,
        high=tally.high + high,
        surplus=tally.surplus + len(differing) - len(chosen),
    ), frozenset(chosen)


def _ranges(cfg: RunConfig, groups: Sequence[SampleGroup]) -> dict[int, Range]:
    """By prompt id, over what credit will see: answers that are not dropped, rewards within `reward.clip`.

    An answer whose judgement failed has the reward `error_score`, which credit will see. A part it has not: it tells
    nothing of correctness, and its score, in the unit of the reward, would make a group differ that is solved.
    """
    by = cfg.rollout.dynamic_sampling.by
    clip = cfg.reward.clip if by == "reward" else None
    found = {}
    for group in groups:
        kept = [sample for sample in group.samples if not (cfg.algorithm.drop_cut_off and is_cut_off(sample))]
        compared = [sample for sample in kept if by == "reward" or not has_failed(sample)]
        values = [_within(clip, _compared(sample, by)) for sample in compared or group.samples]
        # Of a group that is left out altogether nothing remains that could differ.
        found[group.prompt.id] = (min(values), max(values) if compared else min(values))
    return found


def _within(clip: Range | None, value: float) -> float:
    return value if clip is None else min(max(value, clip[0]), clip[1])


def _compared(sample: Sample, by: str) -> float:
    if by == "reward" or has_failed(sample):
        assert sample.reward is not None, "groups are judged before they are chosen"
        return sample.reward
    if by not in sample.reward_parts:
        known = ", ".join(["reward", *sorted(part for part in sample.reward_parts if part != RESERVED_PART)])
        raise ValueError(f"rollout.dynamic_sampling.by: the reward has no part {by!r}; it has {known}")
    return sample.reward_parts[by]


def _report_shortage(run: Run, step: int, tally: Tally) -> str:
    rollout = run.cfg.rollout
    settings, wanted = rollout.dynamic_sampling, rollout.prompts_per_step
    return (
        f"dynamic sampling, step {step}: of {tally.tried} prompts tried, {tally.kept} have answers that differ in "
        f"{settings.by}, of {wanted} needed (rollout.prompts_per_step); {tally.low} groups agree on a value below "
        f"{run.cfg.eval.accuracy_threshold:g} (too hard) and {tally.high} on one of at least that (solved).\n"
        f"The budget of {settings.max_prompts_ratio} x {wanted} prompts is spent "
        "(rollout.dynamic_sampling.max_prompts_ratio). Use other data, more answers a prompt "
        f"(rollout.samples_per_prompt, now {rollout.samples_per_prompt}), a finer reward, fewer prompts a step, or "
        "rollout.dynamic_sampling.on_shortage: train"
    )


def _judged(run: Run, log: StepLog, step: int, num_prompts: int) -> list[SampleGroup]:
    with log.timer("rollout"):
        prompts = run.world.lead(lambda: run.prompts.take(num_prompts))  # type: ignore[union-attr]
        sampling, num_samples = run.rollout.training_sampling(), run.cfg.rollout.samples_per_prompt
        groups = _answered(run, prompts, sampling, num_samples=num_samples, purpose="train", step=step)
        baselines: list[SampleGroup] = []
        if run.needs_greedy:
            greedy = run.rollout.greedy_sampling()
            baselines = _answered(run, prompts, greedy, num_samples=1, purpose="greedy", step=step)
    with log.timer("reward"):
        groups = judge(run.world, run.reward, groups)
        if run.needs_greedy:
            baselines = judge(run.world, run.reward, baselines)
    num_failed, num_judged = count_failures([*groups, *baselines])
    log.put(f"reward_parts/{RESERVED_PART}", Mean(num_failed, num_judged))
    return _with_baselines(groups, baselines) if run.needs_greedy else groups


def _answered(
    run: Run, prompts: Sequence[Prompt], sampling: SamplingConfig, *, num_samples: int, purpose: str, step: int
) -> list[SampleGroup]:
    return generate_or_recover(run, prompts, sampling, num_samples=num_samples, purpose=purpose, version=step - 1)


def _with_baselines(groups: Sequence[SampleGroup], greedy: Sequence[SampleGroup]) -> list[SampleGroup]:
    rewards = {group.prompt.id: group.samples[0].reward for group in greedy}
    return [dataclasses.replace(group, greedy_reward=rewards[group.prompt.id]) for group in groups]
