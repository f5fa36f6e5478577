"""Held-out evaluation: every prompt of every set, greedy and, if asked, several sampled answers each.

In: a run whose engines serve. Out: metrics, and the answers as JSONL under eval/. Nothing is dropped: the counts are
those of the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlmegatron.config.schema import EvalConfig
from rlmegatron.metrics.evaluation import accuracy_metrics, sampled_metrics
from rlmegatron.rewards.judge import count_failures
from rlmegatron.trainer.collect import judge
from rlmegatron.trainer.hand_over import generate_or_recover
from rlmegatron.trainer.run import Run
from rlmegatron.trainer.samples_file import write_samples
from rlmegatron.types import Prompt, SampleGroup


def evaluate(run: Run, step: int) -> dict[str, float]:
    """Collective; the metrics of all sets, the same on every rank."""
    config, metrics = run.cfg.eval, dict[str, float]()
    for name, prompts in run.eval_sets.items():
        run.say(f"evaluating {name} after step {step}: {_answers(len(prompts), config)}")
        if config.greedy:
            metrics |= _evaluate(run, step, name, prompts, kind="greedy", num_samples=1)
        if config.samples:
            metrics |= _evaluate(run, step, name, prompts, kind="sampled", num_samples=config.samples)
    return metrics


def _answers(num_prompts: int, config: EvalConfig) -> str:
    kinds = ["greedy"] * config.greedy + [f"{config.samples} sampled"] * bool(config.samples)
    return f"{' and '.join(kinds)} answers to each of {num_prompts} prompts"


def _evaluate(
    run: Run, step: int, name: str, prompts: Sequence[Prompt], *, kind: str, num_samples: int
) -> dict[str, float]:
    sampling = run.rollout.eval_sampling(run.cfg.eval, greedy=kind == "greedy")
    purpose = f"eval/{name}/{kind}"
    groups = generate_or_recover(run, prompts, sampling, num_samples=num_samples, purpose=purpose, version=step)
    groups = to_lead(run, judge(run.world, run.reward, groups))
    return run.world.lead(lambda: _summary(run, step, name, kind, prompts, groups))


def _summary(
    run: Run, step: int, name: str, kind: str, prompts: Sequence[Prompt], groups: Sequence[SampleGroup]
) -> dict[str, float]:
    assert [group.prompt.id for group in groups] == [prompt.id for prompt in prompts], f"{name}: a prompt was dropped"
    write_samples(run.directory / "eval" / name / f"step_{step:06d}_{kind}.jsonl", groups, step=step)
    config = run.cfg.eval
    found = accuracy_metrics(groups, kind=kind, threshold=config.accuracy_threshold)
    if kind == "sampled":
        found |= sampled_metrics(
            groups, num_samples=config.samples, threshold=config.accuracy_threshold, pass_at=config.pass_at
        )
    num_failed, num_judged = count_failures(groups)
    if num_judged:
        found[f"{kind}_error"] = num_failed / num_judged
    return {f"eval/{name}/{metric}": value for metric, value in found.items()}


def to_lead(run: Run, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """All groups on rank 0 in the order of their prompts, none elsewhere; without experts, which no file holds."""
    nothing: list[SampleGroup] = []
    light = [replace(g, samples=tuple(replace(one, routed_experts=None) for one in g.samples)) for g in groups]
    received = run.world.exchange([light if rank == 0 else nothing for rank in range(run.world.size)])
    return sorted((group for part in received for group in part), key=lambda group: group.prompt.id)
