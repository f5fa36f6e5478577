"""Whole runs on real Megatron-Core and SGLang, with a tiny random model: what they leave behind and what they agree on.

One run of four steps on two data-parallel ranks serves as the reference; other layouts and resumed runs are slow. The
numbers say nothing about learning on a real task.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agreement import AGREEMENT, assert_engine_and_learner_agree, assert_same_step
from jobs import Job, Workspace, has_metrics, metrics_of, samples_of

from rlmegatron.config.load import load

STEPS = range(1, 5)
NUM_SAMPLES = 32
"""Prompts per step times samples per prompt."""
EVERY_SAMPLE = "logging.rollout_samples=1000"


def load_export(directory: Path) -> tuple[Any, Any]:
    """Model and tokenizer through transformers alone."""
    from rlmegatron.platform.torchvision_ops import install_torchvision_hook

    install_torchvision_hook()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(directory)


def greedy_answer(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    import torch

    answer: list[int] = []
    while len(answer) < max_new_tokens and model.config.eos_token_id not in answer:
        with torch.no_grad():
            answer.append(int(model(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
    return answer


def logprobs(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    import torch

    with torch.no_grad():
        table = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return [table[len(prompt) - 1 + place, token].item() for place, token in enumerate(answer)]


def test_a_run_leaves_all_that_is_promised(base: Path) -> None:
    assert {entry.name for entry in base.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "eval",
        "export",
        "logs",
        "metrics.jsonl",
        "reshard",
        "rollouts",
        "tensorboard",
    }
    assert [entry.name for entry in (base / "checkpoints").iterdir()] == ["step_000004"]
    assert len(list((base / "tensorboard").glob("events.out.tfevents.*"))) == 1
    assert sorted(entry.name for entry in (base / "logs").iterdir()) == ["engine_000.log", "engine_001.log"]
    assert sorted(metrics_of(base)) == list(STEPS)
    for step in STEPS:
        assert len(samples_of(base, step)) == NUM_SAMPLES


def test_the_resolved_config_of_a_run_is_a_config(base: Path, workspace: Workspace) -> None:
    assert load(str(base / "config.yaml"), []) == load(str(workspace.path / "run.yaml"), ["name=base"])


def test_engine_and_learner_agree_at_every_step(base: Path) -> None:
    assert_engine_and_learner_agree(base, STEPS)


def test_reward_rises_when_it_is_easy(base: Path) -> None:
    rows = metrics_of(base)
    assert rows[4]["reward/mean"] > rows[1]["reward/mean"] + 0.1


def test_metrics_are_those_of_the_samples(base: Path) -> None:
    for step in STEPS:
        row, samples = metrics_of(base)[step], samples_of(base, step)
        rewards = [sample["reward"] for sample in samples]
        mean = sum(rewards) / len(rewards)
        assert row["reward/mean"] == pytest.approx(mean)
        assert row["reward/std"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)))
        assert row["reward/accuracy"] == pytest.approx(sum(reward >= 0.5 for reward in rewards) / len(rewards))
        assert row["response/length_mean"] == pytest.approx(sum(s["num_tokens"] for s in samples) / len(samples))
        cut_off = sum(sample["finish_reason"] == "length" for sample in samples)
        assert row["response/clip_ratio"] == pytest.approx(cut_off / len(samples))


def test_the_export_answers_as_the_engine_did(base: Path, workspace: Workspace) -> None:
    """Greedy answers of the last evaluation; that all log-probabilities agree is a slow test."""
    model, tokenizer = load_export(base / "export")
    lines = (base / "eval" / "test" / "step_000004_greedy.jsonl").read_text().splitlines()
    assert len(lines) == 16
    for sample in map(json.loads, lines):
        answer = greedy_answer(model, tokenizer.encode(sample["prompt"], add_special_tokens=False), 6)
        assert len(answer) == sample["num_tokens"]
        assert tokenizer.decode(answer, skip_special_tokens=True) == sample["response"]
    before, _ = load_export(workspace.path / "model")
    assert (model.lm_head.weight - before.lm_head.weight).abs().max() > 1e-3


def test_resume_never_refuses_a_directory_with_a_checkpoint(base: Path, workspace: Workspace) -> None:
    metrics = (base / "metrics.jsonl").read_bytes()
    outcome = workspace.run("name=base", "train.resume=never", ranks=0)
    assert outcome.code == 2
    assert outcome.output.count("train.resume: 'never', but runs/base/checkpoints holds step_000004") == 1
    assert (base / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
def test_an_engine_over_several_ranks_changes_nothing(base: Path, workspace: Workspace) -> None:
    run = workspace.train("engine_tp2", "train.steps=3", "rollout.tensor=2", "parallel.pipeline=2")
    assert_engine_and_learner_agree(run, range(1, 4))
    assert_same_step(run, base, 1)


@pytest.mark.slow
def test_every_transport_brings_the_same_weights(base: Path, workspace: Workspace) -> None:
    """With the same seed the same answers and rewards, step by step; so does 'collective' when an engine dies in it
    (`test_failures.py`)."""
    runs = {
        name: workspace.train(f"tp2_{name}", "train.steps=3", "parallel.tensor=2", f"weight_sync.transport={name}")
        for name in ("hf_stream", "peer")
    }
    assert_engine_and_learner_agree(runs["hf_stream"], range(1, 4))
    assert_same_step(runs["hf_stream"], base, 1)
    for run in runs.values():
        for step in range(1, 4):
            assert samples_of(run, step) == samples_of(runs["hf_stream"], step)
            assert metrics_of(run)[step]["reward/mean"] == metrics_of(runs["hf_stream"])[step]["reward/mean"]


@pytest.mark.slow
def test_ppo_with_a_reference_and_the_divergence_in_the_reward(base: Path, workspace: Workspace) -> None:
    run = workspace.train(
        "ppo",
        "train.steps=3",
        "algorithm.advantage=gae",
        "algorithm.kl.where=reward",
        "algorithm.kl.coef=0.05",
        "critic.optimizer.lr=1e-3",
    )
    assert_engine_and_learner_agree(run, range(1, 4))
    assert samples_of(run, 1) == samples_of(base, 1)
    rows = metrics_of(run)
    for step in range(1, 4):
        assert all(value is not None and math.isfinite(value) for value in rows[step].values()), rows[step]
        assert {"critic/loss", "critic/explained_variance", "actor/kl_ref"} <= rows[step].keys()
    assert rows[3]["actor/kl_ref"] > rows[1]["actor/kl_ref"] > 0
    assert {path.name for path in (run / "checkpoints" / "step_000003").iterdir()} == {"actor", "critic", "state.json"}


@pytest.fixture(scope="session")
def half(workspace: Workspace) -> Path:
    """The first two steps of `base`, as a finished run."""
    return workspace.train("half", "train.steps=2")


def continued(workspace: Workspace, half: Path, name: str, *overrides: str) -> Path:
    """A copy of the finished half under another name, run on to step 4."""
    shutil.copytree(half, half.with_name(name))
    return workspace.train(name, "train.steps=4", *overrides)


@pytest.fixture(scope="session")
def recorded(workspace: Workspace, half: Path) -> Iterator[tuple[Path, list[dict[str, Any]], list[list[float]]]]:
    """The continued run, the answers of its step 3 and what the learner said of them before that step's update."""
    run = continued(
        workspace,
        half,
        "continued",
        "algorithm.policy_loss=user_losses:recorded_ppo_clip",
        "reward.name=user_rewards:recorded_small_digits",
    )
    files = sorted(workspace.path.glob("answers_*.jsonl"))
    assert len(files) == 2, "one reward worker on each rank"
    answers = [json.loads(line) for file in files for line in file.read_text().splitlines()[: NUM_SAMPLES // 2]]
    logp_files = sorted(workspace.path.glob("old_logp_rank_*.jsonl"))
    lines = [line for file in logp_files for line in file.read_text().splitlines()[:2]]  # two mini-batches a step
    yield run, answers, [row for line in lines for row in json.loads(line)]


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(base: Path, recorded: tuple[Path, Any, Any]) -> None:
    run = recorded[0]
    assert sorted(metrics_of(run)) == list(STEPS)
    for step in STEPS:
        assert_same_step(run, base, step)


@pytest.mark.slow
def test_an_export_gives_the_log_probabilities_of_the_learner(
    half: Path, recorded: tuple[Path, list[dict[str, Any]], list[list[float]]]
) -> None:
    """The policy exported after step 2 is the one that the next run scored its answers with before updating."""
    model, tokenizer = load_export(half / "export")
    _, answers, learner = recorded
    assert len(answers) == len(learner) == NUM_SAMPLES
    for answer in answers:
        prompt = tokenizer.encode(answer["prompt"], add_special_tokens=False)
        expected = logprobs(model, prompt, answer["token_ids"])
        same = [row for row in learner if row == pytest.approx(expected, abs=AGREEMENT, rel=0)]
        assert same, f"the learner has no such log-probabilities: {expected}"
        learner.remove(same[0])


@pytest.mark.slow
def test_a_run_resumes_at_another_layout(base: Path, workspace: Workspace, half: Path) -> None:
    run = continued(workspace, half, "continued_tp2", "parallel.tensor=2")
    for step in STEPS:
        assert_same_step(run, base, step)


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_ends_well(workspace: Workspace, start: Callable[..., Job]) -> None:
    run = workspace.path / "runs" / "told_to_stop"
    job = start("name=told_to_stop", "train.steps=1000")
    job.wait_for(lambda: has_metrics(run), "the first step")
    job.signal_rank(0, signal.SIGUSR1)
    outcome = job.finish()
    assert outcome.code == 0, outcome.output
    last = max(metrics_of(run))
    assert last < 1000
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == [f"step_{last:06d}"]


@pytest.mark.slow
def test_answers_all_cut_off_with_equal_rewards_teach_nothing(workspace: Workspace) -> None:
    model = workspace.copy_model("model_without_eos", eos_token_id=None)
    (model / "generation_config.json").unlink()
    run = workspace.train(
        "cut_off",
        f"model.path={model.name}",
        "rollout.max_new_tokens=1",
        "reward.name=user_rewards:constant",
        "train.steps=2",
        EVERY_SAMPLE,
        ranks=1,
    )
    for step in (1, 2):
        row = metrics_of(run)[step]
        assert all(value is not None and math.isfinite(value) for value in row.values()), row
        assert {sample["finish_reason"] for sample in samples_of(run, step)} == {"length"}
        assert (row["response/clip_ratio"], row["response/length_max"]) == (1.0, 1.0)
        assert (row["reward/mean"], row["reward/std"]) == (0.25, 0.0)
        assert (row["actor/loss"], row["actor/grad_norm"]) == (0.0, 0.0)
    before, _ = load_export(model)
    after, _ = load_export(run / "export")
    for name, weight in before.state_dict().items():
        assert weight.equal(after.state_dict()[name]), name
