"""The notes of several ranks become one row, each number reduced the way its metric says."""

import pickle

import pytest

from rlmegatron.metrics.log import StepLog
from rlmegatron.metrics.values import Distribution, Last, Max, Mean, Sum


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def test_phases_nest_and_repeat_and_count_when_they_raise():
    clock = Clock()
    log = StepLog(1, clock)
    with log.timer("update"):
        clock.now += 1
        for _ in range(2):
            with log.timer("actor"):
                clock.now += 3
    with pytest.raises(RuntimeError), log.timer("publish"):
        clock.now += 5
        raise RuntimeError
    with log.timer("rollout"):
        clock.now += 2
    assert StepLog.merge([log.payload()]) == {
        "time/update": 7,
        "time/update/actor": 6,
        "time/publish": 5,
        "time/rollout": 2,
    }


def test_ranks_merge_by_the_rule_of_each_metric():
    clock = Clock()
    payloads = []
    for rank in range(3):
        log = StepLog(4, clock)
        log.add({"loss": Mean(10.0 * rank, rank), "tokens": Sum(100), "lr": Last(1e-4)}, prefix="actor/")
        log.put("reward/", Distribution.of([float(rank)]))
        log.put("rollout/logp_diff_max", Max(0.1 * rank))
        with log.timer("rollout"):
            clock.now += rank
        payloads.append(pickle.loads(pickle.dumps(log.payload())))
    assert StepLog.merge(payloads) == {
        "actor/loss": 10.0,
        "actor/tokens": 300,
        "actor/lr": 1e-4,
        "reward/mean": 1.0,
        "reward/std": pytest.approx((2 / 3) ** 0.5),
        "reward/min": 0.0,
        "reward/max": 2.0,
        "rollout/logp_diff_max": 0.2,
        "time/rollout": 2.0,
    }


def test_noting_a_name_again_merges():
    log = StepLog(1)
    log.put("loss", Mean.of([1.0]))
    log.put("loss", Mean.of([2.0, 6.0]))
    assert StepLog.merge([log.payload()]) == {"loss": 3.0}


def test_a_name_on_some_ranks_only_counts_there():
    with_it, without = StepLog(1), StepLog(1)
    with_it.put("critic/loss", Mean.of([2.0]))
    assert StepLog.merge([without.payload(), with_it.payload()]) == {"critic/loss": 2.0}


def test_a_bare_number_is_refused():
    with pytest.raises(ValueError, match="metric 'loss': 1.0 does not say how it is reduced"):
        StepLog(1).put("loss", 1.0)


def test_two_kinds_under_one_name_are_refused():
    one, other = StepLog(1), StepLog(1)
    one.put("x", Sum(1))
    other.put("x", Max(1))
    with pytest.raises(ValueError, match="metric 'x' was noted as two kinds: Sum and Max"):
        StepLog.merge([one.payload(), other.payload()])
    with pytest.raises(ValueError, match="metric 'x' was noted as two kinds"):
        one.put("x", Max(1))


def test_two_metrics_with_one_final_name_are_refused():
    log = StepLog(1)
    log.put("reward/", Distribution.of([1.0]))
    log.put("reward/mean", Mean.of([1.0]))
    with pytest.raises(ValueError, match="two metrics give 'reward/mean'"):
        StepLog.merge([log.payload()])
