"""Online reinforcement learning: act, judge, score, credit, learn, publish. Every rank executes every line.

In: a `Run`. Out: a trained policy, checkpoints, metrics and an export.
"""

from __future__ import annotations

import time

from rlmegatron.metrics.log import StepLog
from rlmegatron.trainer.batch import StepBatch, build_step_batch
from rlmegatron.trainer.collect import judge
from rlmegatron.trainer.credit import add_advantages, add_scores
from rlmegatron.trainer.evaluate import evaluate, to_lead
from rlmegatron.trainer.facts import agreement_metrics, answer_metrics, memory_metrics
from rlmegatron.trainer.hand_over import (
    generate_or_recover,
    hand_device_to_engine,
    hand_device_to_learner,
    publish_weights,
)
from rlmegatron.trainer.run import Run, open_sinks
from rlmegatron.trainer.samples_file import write_samples
from rlmegatron.trainer.state import export_policy, restore, save
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
        with log.timer("rollout"):
            prompts = world.lead(lambda: run.prompts.take(cfg.rollout.prompts_per_step))  # type: ignore[union-attr]
            groups = generate_or_recover(
                run,
                prompts,
                run.rollout.training_sampling(),
                num_samples=cfg.rollout.samples_per_prompt,
                purpose="train",
                version=step - 1,
            )
        with log.timer("reward"):
            groups = judge(world, run.reward, groups)
            _keep_samples(run, groups, step)
        hand_device_to_learner(run)
        with log.timer("score"):
            batch, entropy = add_scores(run.learner, _step_batch(run, groups))
        with log.timer("credit"):
            batch = add_advantages(
                batch, run.advantage, cfg.algorithm, group=run.learner.topology.dp_group, collect=world.gather
            )
        with log.timer("update"):
            _learn(run, batch, log, step)
        if _is_due(cfg.checkpoint.every, step) and step < cfg.train.steps:
            with log.timer("save"):
                save(run, step)
        with log.timer("publish"):
            publish_weights(run, version=step)
            hand_device_to_engine(run)
        _note(run, batch, entropy, log)
        _report_step(run, batch, log, started)
        if _is_due(cfg.eval.every, step) and step < cfg.train.steps:
            _report_evaluation(run, step)
    if step < cfg.train.steps:
        run.say(f"stopped as asked after step {step} of {cfg.train.steps}")
    _finish(run, step)


def _step_batch(run: Run, groups: list[SampleGroup]) -> StepBatch:
    topology = run.learner.topology
    return build_step_batch(
        run.world,
        groups,
        dp_ranks=run.dp_ranks,
        num_mini_batches=run.cfg.train.mini_batches,
        max_tokens=run.cfg.train.micro_batch_tokens,
        # Megatron's interleaved schedule works through micro-batches in rounds of one per stage.
        micro_batch_multiple=topology.pp if topology.vpp > 1 else 1,
        device=run.world.device,
    )


def _learn(run: Run, batch: StepBatch, log: StepLog, step: int) -> None:
    cfg, learner = run.cfg, run.learner
    if learner.critic is not None:
        with log.timer("critic"):
            for metrics in update_critic(learner, batch, run.objectives, epochs=cfg.critic.epochs or cfg.train.epochs):
                log.add(metrics, prefix="critic/")
    if learner.critic is None or step > cfg.critic.warmup_steps:
        with log.timer("actor"):
            for metrics in update_actor(learner, batch, run.objectives, epochs=cfg.train.epochs):
                log.add(metrics, prefix="actor/")


def _note(run: Run, batch: StepBatch, entropy: object, log: StepLog) -> None:
    topology = run.learner.topology
    if run.world.is_lead:
        log.add(answer_metrics(batch.facts, accuracy_threshold=run.cfg.eval.accuracy_threshold))
    if topology.tp_rank == 0 and topology.pp_rank == 0:
        log.add(agreement_metrics(batch.local, entropy))  # type: ignore[arg-type]
    log.add(memory_metrics(run.world.device))


def _report_step(run: Run, batch: StepBatch, log: StepLog, started: float) -> None:
    """One reduction over all ranks, one write."""
    payloads = run.world.gather(log.payload())

    def write() -> None:
        assert run.sinks is not None
        metrics = StepLog.merge(payloads)
        seconds = time.perf_counter() - started
        num_tokens = sum(sample.num_tokens for sample in batch.facts)
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


def _finish(run: Run, step: int) -> None:
    _report_evaluation(run, step)
    hand_device_to_learner(run)
    save(run, step)
    if run.cfg.checkpoint.export and step >= run.cfg.train.steps:
        run.say(f"exported {export_policy(run)}")
    if run.world.is_lead:
        assert run.sinks is not None
        run.sinks.close()


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
