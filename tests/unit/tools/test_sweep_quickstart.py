"""The sweep with a stand-in for the runs: what is repeated, what a failure does, and what the table says.

None of them trains; that launch/quickstart.sh prints the line which the sweep reads is tested by the end-to-end run.
"""

import json
import subprocess
from pathlib import Path

import pytest
import sweep_quickstart
import yaml
from quickstart.results import Result, markdown_table, read_result

ROOT = Path(__file__).resolve().parents[3]


class Runner:
    """Stands in for launch/quickstart.sh: leaves what a run leaves, or fails for the presets in `failing`."""

    def __init__(self, failing=(), rows=None):
        self.failing, self.rows, self.started = failing, rows, []

    def __call__(self, command, log, poll):
        script, preset, option, seed, *overrides, run_dir = command[1:]
        assert (Path(script).name, option) == ("quickstart.sh", "--seed")
        self.started.append((preset, int(seed), *overrides))
        poll()
        if preset in self.failing:
            log.write_text("no such luck\n")
            return 7
        write_run(Path(run_dir.removeprefix("run_dir=")), preset, self.rows)
        poll()
        log.write_text("epoch\nquickstart: accuracy 0.31 -> 0.97 on 512 held-out problems, 2 steps, 83 s, run there\n")
        return 0


def write_run(run, preset, rows=None):
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text((ROOT / "yaml_configs" / f"quickstart_{preset}.yaml").read_text())
    rows = rows or [evaluation(0, 0.31, 0.25), step(1, 1e-6), step(2, 3e-6), evaluation(2, 0.97, 0.95)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(number, greedy, sampled):
    return {"step": number, "eval/test/greedy_accuracy": greedy, "eval/test/sampled_accuracy": sampled}


def step(number, difference, **more):
    return {"step": number, "rollout/logp_diff_max": difference, **more}


def sweep(tmp_path, runner, *arguments):
    return sweep_quickstart.main(["--out", str(tmp_path), *arguments], runner)


def test_every_preset_runs_with_every_seed_by_default(tmp_path, capsys):
    runner = Runner()
    assert sweep(tmp_path, runner) == 0
    names = {path.stem.removeprefix("quickstart_") for path in (ROOT / "yaml_configs").glob("quickstart_*.yaml")}
    assert runner.started == [(name, seed) for name in sorted(names) for seed in (1, 2, 3)]
    assert "| `grpo` | 1, 2, 3 | .31, .31, .31 | .97, .97, .97 |" in capsys.readouterr().out


def test_a_finished_run_is_not_repeated(tmp_path, capsys):
    assert sweep(tmp_path, Runner(), "--presets", "grpo", "--seeds", "1") == 0
    runner = Runner()
    assert sweep(tmp_path, runner, "--presets", "ppo", "grpo", "--seeds", "1", "2") == 0
    assert runner.started == [("ppo", 1), ("ppo", 2), ("grpo", 2)]
    assert "grpo seed 1: accuracy 0.31 -> 0.97 (sampled 0.95), 2 steps, 83 s (there already)" in capsys.readouterr().out


def test_a_run_of_other_settings_is_repeated(tmp_path, monkeypatch):
    sweep(tmp_path, Runner(), "--presets", "grpo", "--seeds", "1")
    runner = Runner()
    sweep(tmp_path, runner, "--presets", "grpo", "--seeds", "1", "train.steps=9")
    changed = tmp_path / "changed.yaml"
    changed.write_text("name: other\n")
    monkeypatch.setattr(sweep_quickstart, "preset_file", lambda preset: changed)
    sweep(tmp_path, runner, "--presets", "grpo", "--seeds", "1", "train.steps=9")
    assert runner.started == [("grpo", 1, "train.steps=9")] * 2


def test_an_interrupted_run_starts_anew_and_what_was_finished_is_kept(tmp_path):
    class Interrupted(Runner):
        def __call__(self, command, log, poll):
            if command[2] == "ppo":
                raise KeyboardInterrupt
            return super().__call__(command, log, poll)

    arguments = ("--presets", "grpo", "ppo", "--seeds", "1")
    assert sweep(tmp_path, Interrupted(), *arguments) == 130
    assert [record["preset"] for record in json.loads((tmp_path / "results.json").read_text())] == ["grpo"]
    runner = Runner()
    assert sweep(tmp_path, runner, *arguments) == 0
    assert runner.started == [("ppo", 1)]


def test_a_failing_run_is_reported_and_the_others_go_on(tmp_path, capsys):
    runner = Runner(failing=("grpo",))
    assert sweep(tmp_path, runner, "--presets", "grpo", "ppo", "--seeds", "1") == 1
    assert runner.started == [("grpo", 1), ("ppo", 1)]
    out = capsys.readouterr().out
    assert f"sweep: grpo seed 1 failed: exit code 7; see {tmp_path}/grpo_seed1.log" in out.replace("\n", "")
    assert "`ppo`" in (tmp_path / "table.md").read_text()


def test_a_run_that_leaves_no_numbers_has_failed(tmp_path, capsys):
    runner = Runner(rows=[evaluation(0, 0.3, 0.3), step(1, 0.1)])
    assert sweep(tmp_path, runner, "--presets", "grpo", "--seeds", "1") == 1
    assert "at two steps or more, it has 1" in capsys.readouterr().out.replace("\n", " ")


def test_a_result_holds_what_the_files_say(tmp_path):
    write_run(tmp_path, "grpo", [evaluation(0, 0.31, 0.25), step(1, 3e-6), step(2, 1e-6), evaluation(2, 0.97, 0.95)])
    assert read_result(tmp_path, preset="grpo", seed=4, seconds=83.0) == Result(
        preset="grpo",
        seed=4,
        greedy_before=0.31,
        greedy_after=0.97,
        sampled_after=0.95,
        steps=2,
        seconds=83.0,
        answers=2 * 64 * 8,
        largest_logp_difference=3e-6,
    )


def test_answers_that_were_not_learnt_from_count(tmp_path):
    tried = {"dynamic_sampling/prompts_tried": 100.0}
    rows = [evaluation(0, 0.3, 0.3), step(1, 0.0, **tried), step(2, 0.0, **tried), evaluation(2, 0.9, 0.9)]
    write_run(tmp_path / "dapo", "dapo", rows)
    assert read_result(tmp_path / "dapo", preset="dapo", seed=1, seconds=1.0).answers == 2 * 100 * 8
    write_run(tmp_path / "remax", "remax")
    assert read_result(tmp_path / "remax", preset="remax", seed=1, seconds=1.0).answers == 2 * 512 * (1 + 1)


def test_a_difference_that_was_not_finite_is_shown_as_such(tmp_path):
    write_run(tmp_path, "grpo", [evaluation(0, 0.3, 0.3), step(1, None), step(2, 1e-6), evaluation(2, 0.9, 0.9)])
    result = read_result(tmp_path, preset="grpo", seed=1, seconds=1.0)
    assert markdown_table([result]).splitlines()[-1] == "| `grpo` | 1 | .30 | .90 | .90 | 2 | 1 | 1 024 | inf |"


def test_the_table_needs_no_run_and_leaves_out_what_was_moved_aside(tmp_path, capsys):
    sweep(tmp_path, Runner(), "--presets", "grpo", "--seeds", "1")
    (tmp_path / "grpo_seed1").rename(tmp_path / "grpo_seed1.1")
    capsys.readouterr()
    runner = Runner()
    assert sweep(tmp_path, runner, "--table") == 0
    assert runner.started == [] and f"no finished run in {tmp_path}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", "gropo"], "invalid choice: 'gropo'"),
        (["--seeds", "-1"], "at least 0"),
        (["--seed", "1"], "unrecognized arguments: --seed 1"),
        (["steps"], "unrecognized arguments: steps"),
        (["--table"], "out is no directory; give one that a sweep has left runs in"),
    ],
)
def test_a_wrong_command_line_starts_nothing(tmp_path, capsys, arguments, message):
    runner = Runner()
    with pytest.raises(SystemExit) as end:
        sweep(tmp_path / "out", runner, *arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err
    assert runner.started == [] and not (tmp_path / "out").exists()


def test_a_directory_that_cannot_be_made_is_said_and_starts_nothing(tmp_path, capsys):
    (tmp_path / "file").touch()
    runner = Runner()
    with pytest.raises(SystemExit) as end:
        sweep(tmp_path / "file" / "out", runner)
    assert end.value.code == 2 and "--out: cannot make" in capsys.readouterr().err
    assert runner.started == []


def test_what_a_run_prints_goes_to_its_log_and_its_exit_code_comes_back(tmp_path):
    polls = []
    code = sweep_quickstart.run_logged(
        ["bash", "-c", "echo out; echo err >&2; exit 5"], tmp_path / "log", lambda: polls.append(1)
    )
    assert (code, (tmp_path / "log").read_text(), polls) == (5, "out\nerr\n", [1])


def test_a_stopped_sweep_ends_what_it_started(tmp_path):
    def stop_once_it_runs():
        if (tmp_path / "log").read_text():
            raise KeyboardInterrupt

    command = ["bash", "-c", "sleep 100 & echo $!; wait"]
    with pytest.raises(KeyboardInterrupt):
        sweep_quickstart.run_logged(command, tmp_path / "log", stop_once_it_runs)
    process = int((tmp_path / "log").read_text().split()[0])
    status = Path(f"/proc/{process}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()


def test_the_quickstart_knows_every_preset_and_says_what_each_is():
    shown = subprocess.run(
        ["bash", ROOT / "launch" / "quickstart.sh", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for path in (ROOT / "yaml_configs").glob("quickstart_*.yaml"):
        preset, (first, second, third) = path.stem.removeprefix("quickstart_"), path.read_text().splitlines()[:3]
        assert first == "# yaml-language-server: $schema=schema.json"
        assert f"  {preset:14s}{second.removeprefix('# ')}\n" in shown
        assert third.endswith(f"bash launch/quickstart.sh {preset}")
        assert yaml.safe_load(path.read_text())["name"] == path.stem


def test_an_unknown_preset_is_refused_with_those_that_exist():
    done = subprocess.run(
        ["bash", ROOT / "launch" / "quickstart.sh", "gropo"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "unknown argument 'gropo'; presets are" in done.stderr and " grpo " in done.stderr
