"""Builds a run from its configuration: engines, models, transport, data, one after the other on every rank.

In: a `RunConfig` and the ranks. Out: `Run`. Must never train; every mistake that can be seen early is looked for before
an engine is started.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlmegatron.algorithms.table import resolve
from rlmegatron.algorithms.value_scale import ReturnScale
from rlmegatron.checkpoint.directory import CheckpointDirectory
from rlmegatron.config.load import dump
from rlmegatron.config.schema import RunConfig
from rlmegatron.data.prompts import PromptStream, read_all
from rlmegatron.distributed.world import World
from rlmegatron.learner.build import DTYPES
from rlmegatron.learner.groups import start_topology
from rlmegatron.learner.learner import Learner, build_learner
from rlmegatron.metrics.build import build_sinks
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.dist_checkpoint import read_metadata
from rlmegatron.models.export import write_companions
from rlmegatron.models.load import hold_to
from rlmegatron.models.model_files import holds_megatron_checkpoint
from rlmegatron.models.stream import TensorStream
from rlmegatron.models.table import read_architecture, read_config
from rlmegatron.platform.torchvision_ops import install_torchvision_hook
from rlmegatron.rewards.judge import Judge
from rlmegatron.rewards.table import resolve as resolve_reward
from rlmegatron.rollout.api import RoutedLayers
from rlmegatron.rollout.placement import engine_cores, engine_of, place_engines
from rlmegatron.rollout.sglang_engine import EngineSpec, SGLangEngine
from rlmegatron.trainer.adapted import Adapted
from rlmegatron.trainer.collect import Rollout
from rlmegatron.trainer.credit import Credit
from rlmegatron.trainer.run import Run, say
from rlmegatron.trainer.update import Objectives
from rlmegatron.types import Prompt
from rlmegatron.weight_sync.build import build_transport
from rlmegatron.weight_sync.engine_config import keys_for_engines
from rlmegatron.weight_sync.engine_limits import refuse_what_engines_cannot_serve
from rlmegatron.weight_sync.engine_worker import LOADERS
from rlmegatron.weight_sync.engines import Engines
from rlmegatron.weight_sync.transport import Transport
from rlmegatron.weight_sync.verify import Verifier


@contextmanager
def running(cfg: RunConfig, world: World) -> Iterator[Run]:
    """Build everything for a tool with a loop of its own; engines and workers end whatever happens."""
    with ExitStack() as undo:
        yield build_run(cfg, world, undo)


def build_run(cfg: RunConfig, world: World, undo: ExitStack) -> Run:
    """Collective; whatever has to end is put on `undo` as soon as it is started."""
    stop = threading.Event()
    # Schedulers announce the end of an allocation with this signal: finish the step, save, stop.
    signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    world.lead(lambda: _open_directory(cfg, undo))
    world.lead(partial(_check_weights, cfg.model.path))
    if cfg.critic.path:
        world.lead(partial(_check_weights, cfg.critic.path, for_critic=True))
    arch = world.settle("model", lambda: read_architecture(cfg.model.path))
    world.lead(lambda: refuse_what_engines_cannot_serve(arch))
    tokenizer = world.settle("tokenizer", lambda: _tokenizer(cfg.model.path))
    reward = world.settle("reward", lambda: _judge(cfg, undo))
    advantage = world.settle("algorithm", lambda: resolve("advantage", cfg.algorithm.advantage))
    assert cfg.trains_critic == ("values" in advantage.inputs), "the configuration was checked before"
    adapted = Adapted(cfg.algorithm.kl.coef, ReturnScale() if cfg.critic.normalize_returns else None)
    objectives = world.settle("algorithm", lambda: _objectives(cfg, adapted))
    checkpoints = CheckpointDirectory(Path(cfg.directory).resolve() / "checkpoints", keep=cfg.checkpoint.keep)
    world.lead(lambda: _check_resume(cfg, checkpoints))
    prompts, eval_sets = _data(cfg, world, tokenizer)
    say(world, f"starting engines of {cfg.rollout.tensor} on {world.size} ranks; their logs are {cfg.directory}/logs")
    engine_model = world.lead(lambda: _engine_model(cfg, arch, on_cpu=world.device.type == "cpu"))
    rollout = world.settle("engine start", lambda: _rollout(cfg, world, tokenizer, arch, engine_model, undo))
    if world.device.type == "cuda":
        # The two cannot be on the device together; on a CPU they can, and starting side by side is faster.
        rollout.on_engine(world, "engine start", SGLangEngine.wait_ready)
        rollout.on_engine(world, "engine start", SGLangEngine.sleep)
    models = ["actor", *["reference"] * cfg.needs_reference, *["critic"] * cfg.trains_critic]
    own = f" (critic: {cfg.critic.path})" if cfg.critic.path else ""
    say(world, f"building {', '.join(models)} from {cfg.model.path}{own}")
    learner = _learner(cfg, world, arch)
    stream = learner.actor.model.tensor_stream()
    transport, verifier = world.settle("weight sync", lambda: _weight_sync(cfg, world, stream, arch, rollout))
    run = Run(
        cfg=cfg,
        world=world,
        learner=learner,
        rollout=rollout,
        reward=reward,
        stream=stream,
        transport=transport,
        verifier=verifier,
        credit=Credit(advantage, cfg.algorithm, cfg.reward, adapted, learner.topology.dp_group, world.gather),
        objectives=objectives,
        adapted=adapted,
        dp_ranks=world.gather(learner.topology.dp_rank),
        eval_sets=eval_sets,
        checkpoints=checkpoints,
        prompts=prompts,
        stop=stop,
    )
    if prompts is not None:
        for notice in prompts.notices:
            run.say(notice)
    say(world, "waiting for the engines to answer")
    rollout.on_engine(world, "engine start", SGLangEngine.wait_ready)
    return run


def open_sinks(run: Run, *, resumed_from: int | None) -> None:
    """Start the metric sinks on rank 0, once it is known where the run goes on."""

    def build() -> None:
        cfg = run.cfg
        run.sinks = build_sinks(
            cfg.logging,
            directory=cfg.directory,
            run_name=cfg.name,
            total_steps=cfg.train.steps,
            resumed_from=resumed_from,
            run_config=cfg.model_dump(mode="json"),
        )
        (run.directory / "config.yaml").write_text(dump(cfg))  # only now is it sure that this is what runs

    run.world.lead(build)


def _open_directory(cfg: RunConfig, undo: ExitStack) -> None:
    """Make the run directory and hold its lock as long as this process lives."""
    directory = Path(cfg.directory)
    directory.mkdir(parents=True, exist_ok=True)
    lock = undo.enter_context((directory / ".lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{directory} is in use by another run; wait for it, or give this one another name") from None


def _check_resume(cfg: RunConfig, checkpoints: CheckpointDirectory) -> None:
    """A checkpoint that this run cannot go on from shows before anything is started."""
    step = checkpoints.newest()
    if step is None:
        return
    if cfg.train.resume == "never":
        raise ValueError(f"train.resume: 'never', but {cfg.directory} has checkpoints; choose another name or 'auto'")
    trains = ("actor", "critic") if cfg.trains_critic else ("actor",)
    distributed = cfg.parallel.distributed_optimizer
    checkpoints.check(step, trains=trains, seed=cfg.seed, distributed_optimizer=distributed)


def _check_weights(path: str, *, for_critic: bool = False) -> None:
    """A broken or unsuitable checkpoint shows before an engine is started; what is left out of it is said."""
    arch = read_architecture(path, for_critic=for_critic)
    if holds_megatron_checkpoint(path):
        read_metadata(path)
        return
    for line in hold_to(arch, path):
        print(f"{path}: {line}", flush=True)


def _engine_model(cfg: RunConfig, arch: Architecture, *, on_cpu: bool) -> str:
    """Where engines read config.json: they serve what the learner trains, which is never quantised."""
    added = keys_for_engines(read_config(cfg.model.path), arch, on_cpu=on_cpu)
    if not added and not arch.exported_keys:
        return cfg.model.path
    directory = Path(cfg.directory) / "engine_model"
    directory.mkdir(exist_ok=True)
    dtype = DTYPES[cfg.engine_dtype]
    write_companions(Path(cfg.model.path), directory, arch, dtype, added=added)
    return str(directory)


def _tokenizer(path: str) -> Any:
    install_torchvision_hook()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _rollout(
    cfg: RunConfig, world: World, tokenizer: Any, arch: Architecture, engine_model: str, undo: ExitStack
) -> Rollout:
    engines = place_engines(
        world_size=world.size,
        tensor=cfg.rollout.tensor,
        ranks_per_node=world.ranks_per_node,
        train_tensor=cfg.parallel.tensor,
    )
    placement = engine_of(world.rank, engines)
    engine = routed = None
    if cfg.moe.router_replay and arch.experts:
        routed = RoutedLayers(arch.num_layers, arch.experts.layers, arch.experts.top_k)
    if world.rank == placement.lead:
        cores = sorted(os.sched_getaffinity(0))
        engine = SGLangEngine(
            EngineSpec(
                model_path=engine_model,
                dtype=cfg.engine_dtype,
                context_length=cfg.context_length,
                log_path=Path(cfg.directory) / "logs" / f"engine_{placement.index:03d}.log",
                seed=cfg.seed,
                devices=placement.local_ranks,
                cores=engine_cores(placement, cores, ranks_per_node=world.ranks_per_node),
                custom_weight_loaders=LOADERS,
                routed=routed,
            ),
            cfg.rollout,
            decode=lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=True),
        )
        undo.callback(engine.shutdown)
    return Rollout(cfg.rollout, engines, engine, placement.index, cfg.seed, replay=routed is not None)


def _data(cfg: RunConfig, world: World, tokenizer: Any) -> tuple[PromptStream | None, Mapping[str, Sequence[Prompt]]]:
    """Rank 0 reads the files; evaluation prompts are sent to all, training prompts step by step."""
    held: list[PromptStream] = []

    def read() -> dict[str, list[Prompt]]:
        limit = cfg.data.max_prompt_tokens
        held.append(PromptStream(cfg.data, tokenizer, seed=cfg.seed, max_prompt_tokens=limit))
        return {
            name: read_all(path, tokenizer, cfg.data, max_prompt_tokens=limit) for name, path in cfg.eval.sets.items()
        }

    eval_sets = world.lead(read)
    return (held[0] if held else None), eval_sets


def _judge(cfg: RunConfig, undo: ExitStack) -> Judge:
    settings = cfg.reward
    judge = Judge(
        resolve_reward(settings.name, settings.args),
        timeout_s=settings.timeout_s,
        workers=settings.workers,
        on_error=settings.on_error,
        error_score=settings.error_score,
    )
    undo.callback(judge.close)
    return judge


def _learner(cfg: RunConfig, world: World, arch: Architecture) -> Learner:
    topology = start_topology(cfg.parallel, seed=cfg.seed, timeout_s=cfg.train.collective_timeout_s)
    return build_learner(
        arch,
        cfg.model,
        cfg.moe,
        topology,
        world.device,
        temperature=cfg.rollout.temperature,
        actor_optimizer=cfg.actor.optimizer,
        critic_optimizer=cfg.critic.optimizer if cfg.trains_critic else None,
        critic_path=cfg.critic.path,
        with_reference=cfg.needs_reference,
        actor_steps=cfg.num_actor_updates,
        critic_steps=cfg.num_critic_updates,
        distributed_optimizer=cfg.parallel.distributed_optimizer,
    )


def _weight_sync(
    cfg: RunConfig, world: World, stream: TensorStream, arch: Architecture, rollout: Rollout
) -> tuple[Transport, Verifier | None]:
    dtype = DTYPES[cfg.engine_dtype]
    engines = Engines(rollout.engines, tensor=cfg.rollout.tensor, expert=cfg.rollout.expert, dtype=dtype)
    transport = build_transport(
        cfg.weight_sync,
        world,
        stream,
        arch,
        engines,
        train_dtype=cfg.model.dtype,
        engine_dtype=cfg.engine_dtype,
        timeout_s=cfg.train.collective_timeout_s,
        cache=Path(cfg.directory) / "reshard",
        say=lambda line: say(world, line),
    )
    verifier = Verifier(world, stream, arch, engines) if cfg.weight_sync.verify else None
    return transport, verifier


def _objectives(cfg: RunConfig, adapted: Adapted) -> Objectives:
    value_loss = resolve("value_loss", cfg.algorithm.value_loss) if cfg.trains_critic else None
    constant = cfg.algorithm.aggregation_constant or float(cfg.rollout.max_new_tokens)
    return Objectives(cfg.algorithm, adapted, constant, resolve("policy_loss", cfg.algorithm.policy_loss), value_loss)
