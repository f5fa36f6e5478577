"""Whatever goes wrong ends the whole job soon, with one message that says what and where, and leaves no process.

`Outcome.report` demands that exactly one framed report was printed; `Job.finish` that nothing outlives the job.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job, Outcome, Workspace, has_metrics, metrics_of, samples_of

ENDS_WITHIN_S = 15.0
USER_ERROR = 2
LONG_PROMPT = "0123456789" * 2 + "="


def assert_said_once(outcome: Outcome, message: str) -> None:
    assert outcome.output.count(message) == 1, outcome.output
    assert "Traceback" not in outcome.ours, outcome.output


def assert_refused_at_once(workspace: Workspace, name: str, outcome: Outcome, message: str) -> None:
    """Refused by the command line: before torch is loaded, a directory made or an engine started."""
    assert outcome.code != 0
    assert_said_once(outcome, message)
    assert "nothing was started" in outcome.output
    assert not (workspace.path / "runs" / name).exists()


def assert_no_engine_was_started(workspace: Workspace, name: str) -> None:
    assert not (workspace.path / "runs" / name / "logs").exists()


def assert_ended_soon(outcome: Outcome, fault_at: float) -> None:
    assert outcome.code != 0
    assert outcome.ended_at - fault_at < ENDS_WITHIN_S


def fault_noted_by(workspace: Workspace) -> float:
    """When `note_fault` of the user's pieces was called."""
    path = workspace.path / "fault"
    text = path.read_text()
    path.unlink()
    return float(text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.max_new_token=6"], "rollout.max_new_token: unknown key; did you mean rollout.max_new_tokens?"),
        (
            ["rollout.context_length=20"],
            "rollout.context_length: 20 is shorter than data.max_prompt_tokens + rollout.max_new_tokens (22); use at "
            "least 22, or null",
        ),
        (["data.prompt_key=question"], "train.jsonl line 1: no field 'question'; it has 'prompt', 'answer', 'number'"),
        (["data.train=[{path: nowhere.jsonl}]"], "data.train[0].path: nowhere.jsonl does not exist (looked in "),
        (["reward.name=user_rewards:no_such_reward"], "has no 'no_such_reward'"),
    ],
)
def test_a_mistake_in_the_config_is_named(workspace: Workspace, overrides: list[str], message: str) -> None:
    outcome = workspace.run("name=refused", *overrides, ranks=0)
    assert_refused_at_once(workspace, "refused", outcome, message)
    assert outcome.code == USER_ERROR
    assert outcome.seconds < ENDS_WITHIN_S


def test_a_wrong_world_size_and_a_cut_through_heads_are_named_once_by_all_ranks(workspace: Workspace) -> None:
    outcome = workspace.run("name=refused", "parallel.tensor=2", ranks=3)
    message = "world size: 3 is not a multiple of parallel.tensor x parallel.pipeline (2 x 1 = 2); use a multiple of 2"
    assert_refused_at_once(workspace, "refused", outcome, message)
    outcome = workspace.run("name=refused", "parallel.tensor=3", ranks=3)
    message = "parallel.tensor: 3 does not divide num_attention_heads (4); use 1, 2 or 4"
    assert_refused_at_once(workspace, "refused", outcome, message)


def test_an_unwritable_run_directory_is_named(workspace: Workspace) -> None:
    (workspace.path / "in_the_way").write_text("")
    outcome = workspace.run("name=refused", "run_dir=in_the_way/run", ranks=0)
    message = "run_dir: the run directory in_the_way/run cannot be made, because in_the_way is a file; use a directory"
    assert_refused_at_once(workspace, "refused", outcome, message)


def test_an_unknown_architecture_is_named_with_those_that_are_known(workspace: Workspace) -> None:
    model = workspace.copy_model("model_of_another_kind", architectures=["MambaForCausalLM"])
    outcome = workspace.run("name=refused", f"model.path={model.name}", ranks=0)
    assert_refused_at_once(workspace, "refused", outcome, "MambaForCausalLM")
    assert "Qwen3ForCausalLM" in outcome.output


def test_a_cut_safetensors_file_is_named(workspace: Workspace) -> None:
    """One whose header is cut, and one whose tensors are."""
    model = workspace.copy_model("model_that_is_cut")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    for name, kept in (("header", 100), ("tensors", len(whole) - 1000)):
        weights.write_bytes(whole[:kept])
        outcome = workspace.run(f"name={name}", f"model.path={model.name}", ranks=0)
        message = "model_that_is_cut/model.safetensors: cannot be read as safetensors: it is truncated: it has "
        assert_refused_at_once(workspace, name, outcome, f"{message}{kept} bytes")


def test_a_row_without_a_prompt_is_named_by_file_and_line(workspace: Workspace) -> None:
    whole, wrong = {"prompt": "1=", "answer": "1"}, {"question": "2=", "answer": "2"}
    data = workspace.write_rows("seventh.jsonl", [whole] * 6 + [wrong])
    outcome = workspace.run("name=seventh", data, ranks=0)
    assert outcome.code == 1
    message = "seventh.jsonl line 7: no field 'prompt'; it has 'question', 'answer' (set data.prompt_key)"
    assert outcome.report().strip() == message
    assert_said_once(outcome, message)
    assert_no_engine_was_started(workspace, "seventh")


def test_two_runs_in_one_directory_are_refused(workspace: Workspace) -> None:
    directory = workspace.path / "runs" / "taken"
    directory.mkdir(parents=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = workspace.run("name=taken", ranks=0)
    assert outcome.code == 1
    assert_said_once(outcome, "runs/taken is in use by another run; wait for it, or give this one another name")
    assert [entry.name for entry in directory.iterdir()] == [".lock"]


def test_data_with_only_long_prompts_is_refused(workspace: Workspace) -> None:
    data = workspace.write_rows("long.jsonl", [{"prompt": LONG_PROMPT, "answer": "1"}] * 3)
    outcome = workspace.run("name=long", data, ranks=0)
    assert outcome.code == 1
    assert outcome.report().strip() == (
        "long.jsonl: all 3 prompts are longer than 16 tokens (the shortest has 22); raise data.max_prompt_tokens"
    )
    assert_no_engine_was_started(workspace, "long")


def test_a_long_prompt_in_an_evaluation_set_is_named(workspace: Workspace) -> None:
    workspace.write_rows("long_eval.jsonl", [{"prompt": "1=", "answer": "1"}, {"prompt": LONG_PROMPT}])
    outcome = workspace.run("name=long_eval", "eval.sets.test=long_eval.jsonl", ranks=0)
    assert outcome.code == 1
    assert "long_eval.jsonl line 2: the prompt has 22 tokens, allowed are 16" in outcome.report()
    assert_no_engine_was_started(workspace, "long_eval")


@pytest.mark.slow
def test_a_reward_that_raises_names_the_sample(workspace: Workspace) -> None:
    outcome = workspace.run(
        "name=raising", "reward.name=user_rewards:raises_on_one", "rollout.prompts_per_step=64", "eval.sets={}"
    )
    assert_ended_soon(outcome, fault_noted_by(workspace))
    report = outcome.report()
    assert re.search(r"reward failed on rank [01]: RewardError: reward user_rewards:raises_on_one, prompt \d+ ", report)
    assert "(train.jsonl line 6), sample " in report
    assert report.count("RuntimeError: the fifth row is judged by nobody") == 1
    assert "user_rewards.py" in report, "it shows where in the user's code"
    assert "rlmegatron/" not in report, "and nothing of ours"


@pytest.mark.slow
def test_a_rank_that_raises_between_collectives_ends_all(workspace: Workspace) -> None:
    outcome = workspace.run("name=lonely", "algorithm.policy_loss=user_losses:raises_on_rank_1")
    assert_ended_soon(outcome, fault_noted_by(workspace))
    report = outcome.report()
    assert report.startswith("rank 1 failed: RuntimeError: rank 1 does not like this batch\n")
    assert "user_losses.py" in report
    assert "see the report above" in outcome.output.split(report)[1], "torchrun's own summary says where to look"


def start_and_wait_for_a_step(
    workspace: Workspace, start: Callable[..., Job], name: str, *overrides: str
) -> tuple[Job, Path]:
    run = workspace.path / "runs" / name
    job = start(f"name={name}", *overrides)
    job.wait_for(lambda: has_metrics(run), "the first step")
    return job, run


@pytest.mark.slow
def test_a_dead_engine_stops_the_run_and_names_its_log(workspace: Workspace, start: Callable[..., Job]) -> None:
    job, _ = start_and_wait_for_a_step(workspace, start, "dead_engine", "train.steps=100000")
    os.kill(job.engines()[0], signal.SIGKILL)
    fault_at = time.time()
    outcome = job.finish()
    assert_ended_soon(outcome, fault_at)
    report = outcome.report()
    assert re.search(
        r"the engine's process \d+ has ended \(exit code -9\); log .*/logs/engine_00[01]\.log, last lines:", report
    )
    assert "Traceback" not in report


def assert_nothing_happened(run: Path, base: Path, outcome: Outcome) -> None:
    """But for one restart."""
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("restarting the engine once and publishing version") == 1
    rows, expected = metrics_of(run), metrics_of(base)
    assert sorted(rows) == sorted(expected)
    for step, row in rows.items():
        assert samples_of(run, step) == samples_of(base, step)
        assert row["rollout/logp_diff_max"] < 1e-4
        assert row["actor/loss"] == pytest.approx(expected[step]["actor/loss"], abs=1e-4)


@pytest.mark.slow
def test_a_dead_engine_is_restarted_and_gives_the_answers_it_would_have_given(
    base: Path, workspace: Workspace, start: Callable[..., Job]
) -> None:
    job, run = start_and_wait_for_a_step(workspace, start, "restarted", "rollout.on_engine_death=restart")
    os.kill(job.engines()[0], signal.SIGKILL)
    assert_nothing_happened(run, base, job.finish())


@pytest.mark.slow
def test_an_engine_that_dies_in_mid_publish_is_restarted_and_published_to_again(
    base: Path, workspace: Workspace
) -> None:
    """The group's other rank does not wait for it, and its engine serves nothing half new."""
    outcome = workspace.run(
        "name=died_in_publish",
        "rollout.on_engine_death=restart",
        "algorithm.policy_loss=user_losses:kills_its_engine_in_mid_publish",
        "parallel.tensor=2",
        "weight_sync.transport=collective",
    )
    assert_nothing_happened(workspace.path / "runs" / "died_in_publish", base, outcome)
    assert "publish (transfer) failed on rank 0: EngineDied" in outcome.output


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_all_engines(workspace: Workspace, start: Callable[..., Job]) -> None:
    job, _ = start_and_wait_for_a_step(workspace, start, "killed", "train.steps=100000")
    job.signal_rank(1, signal.SIGKILL)
    fault_at = time.time()
    outcome = job.finish()
    assert_ended_soon(outcome, fault_at)
    root_cause = outcome.output.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 ", root_cause) and "SIGKILL" in root_cause, outcome.output
    # The other rank may be ended before it notices; when it does notice, it does not blame itself.
    assert "rank 0 failed" not in outcome.output
