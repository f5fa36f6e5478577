"""The numbers of a step that practitioners look at, apart from those of the losses.

In: a scored `StepBatch`. Out: metrics by name. Must never communicate.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlmegatron.algorithms.loss_term import Stat
from rlmegatron.data.batch import TrainBatch
from rlmegatron.metrics.values import Distribution, Max, Mean, Metric, from_parts
from rlmegatron.trainer.batch import SampleFacts


def answer_metrics(facts: Sequence[SampleFacts], *, accuracy_threshold: float) -> dict[str, Metric]:
    """Rewards and lengths of all samples; noted on rank 0 alone, which knows all of them."""
    rewards = [sample.reward for sample in facts]
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in facts:
        for name, value in sample.parts:
            parts[name].append(value)
    if not facts:
        return {}
    return {
        "reward/": Distribution.of(rewards),
        "reward/accuracy": Mean.of([float(reward >= accuracy_threshold) for reward in rewards]),
        "response/length": Distribution.of([float(sample.num_answer_tokens) for sample in facts]),
        "response/clip_ratio": Mean.of([float(sample.cut_off) for sample in facts]),
        **{f"reward_parts/{name}": Mean.of(values) for name, values in parts.items()},
    }


def agreement_metrics(batch: TrainBatch, entropy: Tensor) -> dict[str, Metric]:
    """How far engine and learner disagree about the sampled tokens; noted by one rank of each replica."""
    difference = (batch.rollout_logp - batch.scores("old_logp")).abs()
    return {
        "rollout/logp_diff_mean": Mean.of(difference, batch.loss_mask),
        "rollout/logp_diff_max": Max.of(difference, batch.loss_mask),
        "rollout/entropy": Mean.of(entropy, batch.loss_mask),
    }


def stat_metrics(stats: Mapping[str, Stat]) -> dict[str, Metric]:
    """Statistics of the algorithms as metrics, which know how they are reduced."""
    return {name: from_parts(stat.reduction, stat.parts.tolist()) for name, stat in stats.items()}


def memory_metrics(device: torch.device) -> dict[str, Metric]:
    """Peak memory of this rank in GiB: of the process, and of the device."""
    peak = {"memory/host_peak_gib": Max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)}
    if device.type == "cuda":
        peak["memory/device_peak_gib"] = Max(torch.cuda.max_memory_allocated(device) / 2**30)
    return dict(peak)
