"""The command line as a user meets it: in processes of its own, from another directory, without an installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron import cli

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "launch" / "train.py")
MakeConfig = Callable[..., Path]


def run(
    *arguments: str, cwd: Path, module: bool = False, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    if module:
        inherited["PYTHONPATH"] = str(ROOT)
    program = ["-m", "rlmegatron"] if module else [TRAIN]
    command = [sys.executable, *program, *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_check_prints_the_layout_from_any_directory(make_config: MakeConfig, tmp_path: Path) -> None:
    done = run("--config", str(make_config()), "rollout.tensor=2", "--check", "train.steps=7", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "world   2 ranks (the fewest that fit; --ranks sets another number) = TP 1 x PP 1 x DP 2" in done.stdout
    assert "whole run   7 steps" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_layout_is_planned_without_weights_but_nothing_trains_without_them(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = str(make_config())
    (tmp_path / "model" / "model.safetensors").unlink()
    checked = run("--config", config, "--check", "--ranks", "8", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert f"model.path: {tmp_path / 'model'} has no weights, which a run will need" in checked.stdout
    assert "world   8 ranks" in checked.stdout
    trained = run("--config", config, cwd=tmp_path)
    assert trained.returncode == 2
    assert "has neither model.safetensors nor model.safetensors.index.json" in trained.stderr


def test_check_loads_nothing_that_is_slow_to_load(make_config: MakeConfig, tmp_path: Path) -> None:
    code = (
        "import sys; from rlmegatron.cli import train_main; code = train_main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'megatron', 'sglang', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "--config", str(make_config()), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["--ranks", "4"], {"WORLD_SIZE": "2"}, "4 ranks (from --ranks)"),
        ([], {"WORLD_SIZE": "2"}, "2 ranks (from WORLD_SIZE)"),
    ],
)
def test_the_world_size_of_a_check_comes_from_the_option_then_the_environment(
    make_config: MakeConfig, tmp_path: Path, arguments: list[str], environment: dict[str, str], expected: str
) -> None:
    done = run("check", "--config", str(make_config()), *arguments, cwd=tmp_path, module=True, environment=environment)
    assert done.returncode == 0 and expected in done.stdout


def test_mistakes_are_printed_without_a_traceback_and_end_with_2(make_config: MakeConfig, tmp_path: Path) -> None:
    path = make_config({"algorithm.clip_hgh": 0.3})
    done = run("--config", str(path), cwd=tmp_path, environment={"RANK": "0", "WORLD_SIZE": "2"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"{path}: 1 problem, nothing was started",
        f"  algorithm.clip_hgh: unknown key; did you mean algorithm.clip_high? ({path} line 16)",
    ]


def test_torchrun_shows_a_mistake_once_and_fails(make_config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = make_config({"parallel.tensor": 3})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*launcher, TRAIN, "--config", str(path)],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("parallel.tensor: 3 does not divide num_attention_heads (4); use 1, 2 or 4") == 1


def test_a_mistake_that_rank_0_does_not_see_is_told_by_the_rank_that_does(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setattr(cli, "RANK_0_SPEAKS_WITHIN_S", 0.01)
    path = make_config()
    assert cli.train_main(["--config", str(path), "eval.sets.test=gone.jsonl"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"rank 9: {path}: 1 problem, nothing was started"
    assert second.startswith("  eval.sets.test: gone.jsonl does not exist")


def test_problems_of_model_layout_files_and_reward_are_reported_together(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    overrides = [
        f"model.path={tmp_path / 'no'}",
        "rollout.tensor=2",
        "algorithm.policy_loss=ppo_clp",
        "reward.name=exact_anser",
        f"eval.sets.test={tmp_path / 'gone.jsonl'}",
    ]
    assert cli.train_main(["--config", str(make_config()), *overrides]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(": 5 problems, nothing was started")
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "model.path",
        "rollout.tensor",
        "algorithm.policy_loss",
        "eval.sets.test",
        "reward.name",
    ]


def test_an_unsupported_architecture_is_refused(
    make_config: MakeConfig, make_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(architectures=["FooForCausalLM"])
    assert cli.main(["check", "--config", str(make_config())]) == 2
    (_, line) = capsys.readouterr().err.splitlines()
    assert "architecture FooForCausalLM is not supported; supported: LlamaForCausalLM" in line


def test_resume_never_refuses_a_directory_with_a_whole_checkpoint(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    for other in ("step_000003.partial", "step_5"):
        (checkpoints / other).mkdir(parents=True)
    arguments = ["check", "--config", str(make_config()), "train.resume=never"]
    assert cli.main(arguments) == 0
    (checkpoints / "step_000002").mkdir()
    assert cli.main(arguments) == 2
    expected = f"train.resume: 'never', but {checkpoints} holds step_000002; use another name or run_dir"
    assert expected in capsys.readouterr().err
    assert cli.main([*arguments, "train.resume=auto"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "x", "--ranks", "2"], "--ranks goes with --check"),
        (["--config", "x", "--ranks-per-node", "2"], "--ranks-per-node goes with --check"),
        (["--config", "x", "--check", "--ranks", "0"], "'0' is not a whole number above 0"),
        (
            ["--config", "x", "--train.steps=3"],
            "unknown option --train.steps=3; an override has no dashes: train.steps=VALUE",
        ),
        (["--config", "x", "--chck"], "unknown option --chck"),
        ([], "the following arguments are required: --config"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_what(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.train_main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_training_gets_the_checked_config_and_its_exit_code_comes_back(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import types

    received = []
    trainer = types.ModuleType("rlmegatron.trainer.main")
    trainer.main = lambda cfg: received.append(cfg) or 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlmegatron.trainer.main", trainer)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert cli.train_main(["--config", str(make_config()), "train.steps=5", "rollout.top_p=0.5"]) == 1
    assert [cfg.train.steps for cfg in received] == [5]
    assert capsys.readouterr().err.startswith("warning: rollout.top_p: 0.5 cuts the distribution")


@pytest.mark.parametrize(
    ("arguments", "environment", "size"),
    [
        (["--ranks-per-node", "2"], {}, 2),
        (["--ranks-per-node", "2"], {"LOCAL_WORLD_SIZE": "4"}, 2),
        ([], {"LOCAL_WORLD_SIZE": "4"}, 4),
        ([], {}, 8),
    ],
)
def test_an_engine_over_nodes_is_refused_by_the_size_of_the_option_the_environment_or_usual_machines(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    environment: dict[str, str],
    size: int,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check = ["check", "--config", str(make_config()), "--ranks", "16", *arguments]
    assert cli.main([*check, "rollout.tensor=16"]) == 2
    assert f"engines of 16 ranks would span nodes of {size} ranks; use one of 1, 2" in capsys.readouterr().err
    assert cli.main([*check, "rollout.tensor=2"]) == 0
    assert f"world   16 ranks (from --ranks) on nodes of {size} = TP 1" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0", "two", ""])
def test_a_broken_world_size_in_the_environment_is_refused(
    make_config: MakeConfig, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    monkeypatch.delenv("RANK", raising=False)
    assert cli.train_main(["--config", str(make_config())]) == 2
    assert f"WORLD_SIZE: '{value}' in the environment is not allowed" in capsys.readouterr().err


def test_help_teaches_overrides_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.train_main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert all(
        part in text for part in ("examples:", "torchrun", "overrides:", "rollout.stop_token_ids=[1,2]", "exit codes:")
    )


def test_schema_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["seed"]["default"] == 1
