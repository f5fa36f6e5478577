"""Held-out evaluation: every prompt of every set, greedy and, if asked, sampled.

In: a run whose engines serve. Out: metrics on rank 0 and the answers as JSONL under eval/. Nothing is dropped: the
counts are those of the files.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmegatron.rollout.api import SamplingConfig
from rlmegatron.trainer.collect import judge
from rlmegatron.trainer.hand_over import generate_or_recover
from rlmegatron.trainer.run import Run
from rlmegatron.trainer.samples_file import write_samples
from rlmegatron.types import Prompt, SampleGroup


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Collective; the metrics of all sets, the same on every rank."""
    metrics: dict[str, float] = {}
    for name, prompts in run.eval_sets.items():
        metrics |= _evaluate(run, step, name, prompts, run.rollout.greedy_sampling(), kind="greedy", num_samples=1)
        if run.cfg.eval.samples:
            sampling = run.rollout.training_sampling()
            metrics |= _evaluate(run, step, name, prompts, sampling, kind="sampled", num_samples=run.cfg.eval.samples)
    return metrics


def _evaluate(
    run: Run, step: int, name: str, prompts: Sequence[Prompt], sampling: SamplingConfig, *, kind: str, num_samples: int
) -> dict[str, float]:
    purpose = f"eval/{name}/{kind}"
    groups = generate_or_recover(run, prompts, sampling, num_samples=num_samples, purpose=purpose, version=step)
    groups = to_lead(run, judge(run.world, run.reward, groups))
    return run.world.lead(lambda: _summary(run, step, name, kind, groups))


def _summary(run: Run, step: int, name: str, kind: str, groups: Sequence[SampleGroup]) -> dict[str, float]:
    path = run.directory / "eval" / name / f"step_{step:06d}_{kind}.jsonl"
    write_samples(path, groups, step=step)
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    correct = sum(reward >= run.cfg.eval.accuracy_threshold for reward in rewards)
    return {
        f"eval/{name}/num_prompts": float(len(groups)),
        f"eval/{name}/{kind}_accuracy": correct / len(samples),
        f"eval/{name}/{kind}_reward": sum(rewards) / len(samples),
        f"eval/{name}/{kind}_length": sum(len(sample.token_ids) for sample in samples) / len(samples),
    }


def to_lead(run: Run, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """All groups on rank 0 in the order of their prompts, none elsewhere."""
    nothing: list[SampleGroup] = []
    received = run.world.exchange([list(groups) if rank == 0 else nothing for rank in range(run.world.size)])
    return sorted((group for part in received for group in part), key=lambda group: group.prompt.id)
