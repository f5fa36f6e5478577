"""Every sink gets every step; the console line holds what its legend says; remote runs go on under their own id."""

import importlib
import io
import math
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from rlmegatron.config.schema import LoggingConfig
from rlmegatron.metrics.build import build_sinks
from rlmegatron.metrics.console import ConsoleSink
from rlmegatron.metrics.jsonl import JsonlSink
from rlmegatron.metrics.mlflow import MLflowSink
from rlmegatron.metrics.optional import MLFLOW, TENSORBOARD, WANDB, missing_packages
from rlmegatron.metrics.sinks import FanOut
from rlmegatron.metrics.tensorboard import TensorBoardSink
from rlmegatron.metrics.wandb import WandbSink

METRICS = {
    "reward/mean": 0.25,
    "reward/accuracy": 0.5,
    "response/length_mean": 5.75,
    "actor/entropy": 0.512,
    "actor/loss": -0.0123,
    "perf/tokens_per_s": 1234.4,
    "time/rollout": 0.31,
    "time/update": 0.69,
    "time/update/actor": 0.4,
}


class Recorder:
    """A sink that remembers, and fails when told to."""

    def __init__(self, error=None):
        self.error, self.written, self.closed = error, [], False

    def write(self, step, metrics):
        if self.error:
            raise self.error
        self.written.append((step, metrics))

    def close(self):
        self.closed = True
        if self.error:
            raise self.error


def test_a_failing_sink_does_not_starve_the_others():
    good, bad = Recorder(), Recorder(OSError("disk full"))
    fan_out = FanOut([bad, good])
    with pytest.raises(OSError, match="disk full") as caught:
        fan_out.write(7, METRICS)
    assert caught.value.__notes__ == ["Recorder could not write step 7"]
    assert good.written == [(7, METRICS)]
    with pytest.raises(OSError, match="disk full"):
        fan_out.close()
    assert good.closed


def test_several_failing_sinks_are_all_reported():
    with pytest.raises(ExceptionGroup, match="2 sinks could not close") as caught:
        FanOut([Recorder(OSError("a")), Recorder(OSError("b"))]).close()
    assert [str(error) for error in caught.value.exceptions] == ["a", "b"]


def console_sink(total_steps=60, terminal=False, width=80):
    out, now = io.StringIO(), [1000.0]
    console = Console(file=out, force_terminal=terminal, width=width, highlight=False)
    return ConsoleSink(total_steps=total_steps, console=console, clock=lambda: now[0]), out, now


def test_a_plain_line_holds_every_column_in_one_line():
    sink, out, _ = console_sink()
    sink.write(2, METRICS)
    assert out.getvalue() == (
        "step  2/60 | reward   0.250 | acc 0.500 | len     5.8 | kl         - | ent  0.512 | loss  -0.0123 "
        "| tok/s     1,234 | rollout 0.31s update 0.69s | eta 0:00:58\n"
    )


def test_lines_of_different_steps_are_aligned():
    sink, out, _ = console_sink()
    sink.write(9, METRICS | {"reward/mean": -12.5, "perf/tokens_per_s": 9.0})
    sink.write(10, METRICS | {"actor/kl_ref": 1.5e-3, "reward/mean": math.nan})
    first, second = out.getvalue().splitlines()
    bars = [[i for i, letter in enumerate(line) if letter == "|"] for line in (first, second)]
    assert bars[0] == bars[1]
    assert "kl  1.50e-03" in second and "reward     nan" in second


def test_the_time_to_go_follows_the_wall_clock():
    sink, out, now = console_sink(total_steps=5000)
    sink.write(11, METRICS)
    now[0] += 3
    sink.write(12, METRICS)
    # 1 s of phases for step 11 and 3 s until the line of step 12: 2 s a step.
    assert out.getvalue().splitlines()[1].endswith("eta 2:46:16")


def test_a_terminal_gets_colour_and_a_log_file_does_not():
    plain, coloured = console_sink(), console_sink(terminal=True)
    for sink, _, _ in (plain, coloured):
        sink.write(1, METRICS)
    assert "\x1b[" not in plain[1].getvalue()
    assert "\x1b[" in coloured[1].getvalue()


def test_an_evaluation_gets_a_line_of_its_own():
    sink, out, _ = console_sink()
    sink.write(20, {"eval/test/accuracy": 0.9375, "eval/test/num_prompts": 187.0})
    assert out.getvalue() == "eval 20/60 | test/accuracy 0.938 | test/num_prompts 187\n"


def tensorboard_points(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars("reward/mean")]


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path):
    sink = TensorBoardSink(tmp_path, resumed_from=None)
    for step in (1, 2, 3):
        sink.write(step, {"reward/mean": step / 10})
    assert tensorboard_points(tmp_path) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    sink.close()
    sink = TensorBoardSink(tmp_path, resumed_from=2)
    sink.write(3, {"reward/mean": 0.9})
    sink.close()
    assert tensorboard_points(tmp_path) == [(1, 0.1), (2, 0.2), (3, 0.9)]


class FakeWandbRun:
    def __init__(self, options):
        self.options, self.rows, self.axes, self.finished = options, [], [], False

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, row):
        assert not self.finished
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch):
    runs = []

    def init(**options):
        runs.append(FakeWandbRun(options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return runs


def test_wandb_goes_on_with_its_run_when_the_training_does(wandb_runs, tmp_path):
    def open_sink(resumed_from):
        return WandbSink(project="p", name="n", directory=tmp_path, config={"seed": 1}, resumed_from=resumed_from)

    for resumed_from in (None, 4, None):
        sink = open_sink(resumed_from)
        sink.write(5, {"reward/mean": 0.5})
        sink.close()
    first, resumed, fresh = wandb_runs
    assert first.options["project"] == "p" and first.options["config"] == {"seed": 1}
    assert first.options["id"] == resumed.options["id"] != fresh.options["id"]
    assert first.rows == [{"step": 5, "reward/mean": 0.5}] and first.finished
    assert ("*", "step") in first.axes


class FakeMlflowClient:
    """As much of mlflow.MlflowClient as the sink uses, and as strict: at most 1000 metrics a call."""

    runs: ClassVar[dict] = {}
    experiments: ClassVar[dict] = {}

    def __init__(self, tracking_uri):
        self.uri = tracking_uri

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment_id, run_name):
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "points": [], "status": "RUNNING", "config": None}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status):
        self.runs[run_id]["status"] = status

    def log_dict(self, run_id, dictionary, artifact_file):
        self.runs[run_id]["config"] = dictionary

    def log_batch(self, run_id, metrics):
        assert 0 < len(metrics) <= 1000 and self.runs[run_id]["status"] == "RUNNING"
        self.runs[run_id]["points"] += [(key, value, step) for key, value, _, step in metrics]

    def set_terminated(self, run_id):
        self.runs[run_id]["status"] = "FINISHED"


def test_mlflow_goes_on_with_its_run_when_the_training_does(monkeypatch, tmp_path):
    modules = sys.modules
    monkeypatch.setattr(FakeMlflowClient, "runs", {})
    monkeypatch.setattr(FakeMlflowClient, "experiments", {})
    monkeypatch.setitem(modules, "mlflow", types.SimpleNamespace(MlflowClient=FakeMlflowClient))
    monkeypatch.setitem(modules, "mlflow.entities", types.SimpleNamespace(Metric=lambda *fields: fields))
    for resumed_from, step in ((None, 1), (1, 2), (None, 1)):
        sink = MLflowSink(uri="u", name="n", directory=tmp_path, config={"seed": 1}, resumed_from=resumed_from)
        sink.write(step, {"x": 0.5, **{f"y{i}": 1.0 for i in range(1000)}})
        sink.close()
    first, fresh = FakeMlflowClient.runs.values()
    assert [p for p in first["points"] if p[0] == "x"] == [("x", 0.5, 1), ("x", 0.5, 2)]
    assert len(first["points"]) == 2002 and len(fresh["points"]) == 1001
    assert first["config"] == {"seed": 1} and first["status"] == "FINISHED"
    assert FakeMlflowClient.experiments == {"rlmegatron": "0"}


@pytest.mark.parametrize(
    ("logging", "message"),
    [
        (LoggingConfig(wandb_project="p"), "logging.wandb_project: needs the package 'wandb'.*pip install wandb"),
        (LoggingConfig(mlflow_uri="u"), "logging.mlflow_uri: needs the package 'mlflow'.*pip install mlflow-skinny"),
    ],
)
def test_a_missing_package_is_named_with_the_setting_that_wants_it(logging, message, monkeypatch, tmp_path):
    modules = sys.modules
    monkeypatch.setitem(modules, "wandb", None)
    monkeypatch.setitem(modules, "mlflow", None)
    with pytest.raises(ValueError, match=message):
        build(logging, tmp_path)


@pytest.mark.parametrize(
    ("logging", "setting", "module", "distribution"),
    [
        (LoggingConfig(tensorboard=False, wandb_project="p"), "logging.wandb_project", "wandb", "wandb"),
        (LoggingConfig(tensorboard=False, mlflow_uri="u"), "logging.mlflow_uri", "mlflow", "mlflow-skinny"),
        (LoggingConfig(), "logging.tensorboard", "tensorboard", "tensorboard"),
    ],
)
def test_a_missing_package_is_known_before_a_sink_is_built(logging, setting, module, distribution, packages):
    assert missing_packages(logging) == [
        f"{setting}: needs the package {module!r}, which is not installed; pip install {distribution}, or turn it off"
    ]
    packages(module)
    assert missing_packages(logging) == []


@pytest.mark.parametrize("package", [WANDB, MLFLOW, TENSORBOARD])
def test_the_distribution_that_is_advised_is_the_one_that_setup_installs(package):
    setup = (Path(__file__).parents[3] / "setup.py").read_text(encoding="utf-8")
    assert f'"{package.distributions[0]}>=' in setup


def test_packages_that_nothing_asks_for_are_not_missed(packages):
    assert missing_packages(LoggingConfig(tensorboard=False)) == []
    assert len(missing_packages(LoggingConfig(wandb_project="p", mlflow_uri="u"))) == 3


def test_the_directory_that_a_package_leaves_behind_is_not_the_package(packages, tmp_path):
    (tmp_path / "wandb").mkdir()
    (line,) = missing_packages(LoggingConfig(wandb_project="p", tensorboard=False))
    assert line.startswith("logging.wandb_project: ")


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """None of the trackers can be found but those that `packages(name)` adds, which must not be imported."""
    names = ("wandb", "mlflow", "tensorboard")
    loaded = [name for name in sys.modules if name.partition(".")[0] in names]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def add(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')")
        importlib.invalidate_caches()

    return add


def build(logging, directory):
    return build_sinks(logging, directory=directory, run_name="n", total_steps=3, resumed_from=None, run_config={})


def test_the_sinks_are_those_the_configuration_asks_for(wandb_runs, tmp_path):
    everything = build(LoggingConfig(wandb_project="p"), tmp_path)
    assert {type(sink) for sink in everything.sinks} == {WandbSink, TensorBoardSink, JsonlSink, ConsoleSink}
    everything.close()
    least = build(LoggingConfig(console=False, tensorboard=False), tmp_path)
    assert [type(sink) for sink in least.sinks] == [JsonlSink]
    least.close()
    assert len(wandb_runs) == 1
