"""Online reinforcement learning: act, judge, score, credit, learn, publish. Every rank executes every line.

In: a `Run`. Out: a trained policy, checkpoints, metrics and an export.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from rlmegatron.data.mini_batches import by_group, by_sample
from rlmegatron.distributed.world import RankFailure
from rlmegatron.metrics.log import StepLog
from rlmegatron.metrics.values import Last, Sum
from rlmegatron.trainer.act import Shortage, act
from rlmegatron.trainer.batch import SampleFacts, StepBatch, build_step_batch
from rlmegatron.trainer.build import open_sinks
from rlmegatron.trainer.credit import add_scores
from rlmegatron.trainer.evaluate import evaluate, to_lead
from rlmegatron.trainer.hand_over import hand_device_to_engine, hand_device_to_learner, publish_weights
from rlmegatron.trainer.run import Run
from rlmegatron.trainer.samples_file import write_samples
from rlmegatron.trainer.state import export_policy, restore, save
from rlmegatron.trainer.step_metrics import agreement_metrics, answer_metrics, memory_metrics, stat_metrics
from rlmegatron.trainer.update import update_actor, update_critic
from rlmegatron.types import SampleGroup


def train(run: Run) -> None:
    """Train until `train.steps` steps are done or a stop is asked for; collective."""
    cfg, world = run.cfg, run.world
    step = restore(run)
    if step:
        done = ", the last one: nothing is left to train" if step >= cfg.train.steps else ""
        run.say(f"resumed from step {step}{done}")
    open_sinks(run, resumed_from=step or None)
    publish_weights(run, version=step)  # a broken sync path fails here, not after step 1
    hand_device_to_engine(run)
    if step == 0 and cfg.eval.at_start:
        _report_evaluation(run, step)

    while step < cfg.train.steps and not world.lead(lambda: run.stop.is_set()):
        step += 1
        started = time.perf_counter()
        log = StepLog(step)
        try:
            groups = act(run, log, step)
        except Shortage as shortage:
            _save_and_stop(run, step - 1, str(shortage))
        _keep_samples(run, groups, step)
        hand_device_to_learner(run)
        batch = step_batch(run, groups, step)
        if batch.facts:
            _learn(run, batch, log, step)
        else:
            run.say(f"step {step}: no answer is left to learn from; the weights stay as they are")
        if _is_due(cfg.checkpoint.every, step) and step < cfg.train.steps:
            with log.timer("save"):
                save(run, step)
        with log.timer("publish"):
            publish_weights(run, version=step)
            hand_device_to_engine(run)
        _note(run, batch, log)
        _report_step(run, batch, log, started)
        if _is_due(cfg.eval.every, step) and step < cfg.train.steps:
            _report_evaluation(run, step)
    if step < cfg.train.steps:
        run.say(f"stopped as asked after step {step} of {cfg.train.steps}")
    _finish(run, step)


def step_batch(run: Run, groups: Sequence[SampleGroup], step: int) -> StepBatch:
    """Collective; the judged groups of all ranks as this rank's part of the step's batch."""
    topology, train = run.learner.topology, run.cfg.train

    def split(facts: Sequence[SampleFacts]) -> list[list[int]]:
        if train.split == "sample":
            return by_sample(len(facts), train.mini_batches, seed=f"{run.cfg.seed}/split/{step}")
        return by_group([sample.prompt_id for sample in facts], train.mini_batches)

    return build_step_batch(
        run.world,
        groups,
        dp_ranks=run.dp_ranks,
        split=split,
        drop_cut_off=run.cfg.algorithm.drop_cut_off,
        max_tokens=train.micro_batch_tokens,
        # Megatron's interleaved schedule works through micro-batches in rounds of one per stage.
        micro_batch_multiple=topology.pp if topology.vpp > 1 else 1,
        device=run.world.device,
    )


def _learn(run: Run, batch: StepBatch, log: StepLog, step: int) -> None:
    """Score, give credit and update on a batch that has samples."""
    topology = run.learner.topology
    notes = topology.tp_rank == 0 and topology.pp_rank == 0
    with log.timer("score"):
        batch, entropy = add_scores(run.learner, batch)
    if notes:
        log.add(agreement_metrics(batch.local, entropy))
    with log.timer("credit"):
        batch, stats = run.credit.assign(batch)
    if notes:
        log.add(stat_metrics(stats))
    with log.timer("update"):
        _update(run, batch, log, step)
    kl = run.cfg.algorithm.kl
    if kl.target is not None:
        log.put("actor/kl_coef", Last(run.adapted.kl_coef))
        # A policy that stands still shows nothing of what its weight does.
        if _policy_learns(run, step):
            run.adapted.adapt_kl(kl, measured=run.credit.kl_from_reference(batch.local), num_samples=len(batch.facts))


def _update(run: Run, batch: StepBatch, log: StepLog, step: int) -> None:
    cfg, learner = run.cfg, run.learner
    if learner.critic is not None:
        with log.timer("critic"):
            for metrics in update_critic(learner, batch, run.objectives, epochs=cfg.critic.epochs or cfg.train.epochs):
                log.add(metrics, prefix="critic/")
    if _policy_learns(run, step):
        with log.timer("actor"):
            for metrics in update_actor(
                learner, batch, run.objectives, epochs=cfg.train.epochs, max_kl=cfg.train.max_kl
            ):
                log.add(metrics, prefix="actor/")


def _policy_learns(run: Run, step: int) -> bool:
    """Not in the steps that are the critic's alone."""
    return run.learner.critic is None or step > run.cfg.critic.warmup_steps


def _note(run: Run, batch: StepBatch, log: StepLog) -> None:
    if run.world.is_lead:
        drawn = [*batch.facts, *batch.dropped]
        log.add(answer_metrics(drawn, accuracy_threshold=run.cfg.eval.accuracy_threshold))
        if run.cfg.algorithm.drop_cut_off:
            log.put("response/dropped", Sum(len(batch.dropped)))
    log.add(memory_metrics(run.world.device))


def _report_step(run: Run, batch: StepBatch, log: StepLog, started: float) -> None:
    """One reduction over all ranks, one write."""
    payloads = run.world.gather(log.payload())

    def write() -> None:
        assert run.sinks is not None
        metrics = StepLog.merge(payloads)
        seconds = time.perf_counter() - started
        num_tokens = sum(sample.num_tokens for sample in (*batch.facts, *batch.dropped))
        metrics |= {"time/step": seconds, "perf/tokens_per_s": num_tokens / seconds}
        run.sinks.write(log.step, metrics)

    run.world.lead(write)


def _report_evaluation(run: Run, step: int) -> None:
    if not run.eval_sets:
        return
    metrics = evaluate(run, step)

    def write() -> None:
        assert run.sinks is not None
        run.sinks.write(step, metrics)

    run.world.lead(write)


def _keep_samples(run: Run, groups: list[SampleGroup], step: int) -> None:
    """The first answers of the step go to rollouts/; every engine gives its part."""
    limit = run.cfg.logging.rollout_samples
    if limit:
        per_engine = -(-limit // (len(run.rollout.engines) * run.cfg.rollout.samples_per_prompt))
        kept = to_lead(run, groups[:per_engine])
        path = run.directory / "rollouts" / f"step_{step:06d}.jsonl"
        run.world.lead(lambda: write_samples(path, kept, step=step, limit=limit))


def _save_and_stop(run: Run, step: int, report: str) -> NoReturn:
    """End the run with a report, and lose nothing that was learnt; `step` is the last one done."""
    hand_device_to_learner(run)
    if step:
        save(run, step)
    raise RankFailure(report)


def _finish(run: Run, step: int) -> None:
    _report_evaluation(run, step)
    hand_device_to_learner(run)
    save(run, step)
    if run.cfg.checkpoint.export and step >= run.cfg.train.steps:
        run.say(f"exported {export_policy(run)}")
    if run.world.is_lead:
        assert run.sinks is not None
        run.sinks.close()
    run.say(f"done: the run is in {run.directory}, its numbers in metrics.jsonl")


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
