"""The arithmetic, the order of the sides, the tables and the command line of the benchmark.

None of them measures anything: that the numbers are right for a real run is seen by running the tool.
"""

import io
import json
from pathlib import Path

import bench_step
import pytest
from bench.bare_sglang import BareEngine
from bench.measure import BARE, OURS, REST, Comparison, Round, Spread, Timing, alternate, orders, phases
from bench.report import as_data, comparison_table, phase_table
from rich.console import Console


def comparison(*ratios: float) -> Comparison:
    """Rounds in which the bare side makes 100 tokens/s and ours `ratio` times that."""
    rounds = [Round(ours=Timing(2.0, round(200 * ratio)), bare=Timing(1.0, 100)) for ratio in ratios]
    return Comparison("rollout", "SGLang", rounds)


def shown(table: object) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_speed_counts_tokens_so_that_longer_answers_are_no_disadvantage() -> None:
    assert Round(ours=Timing(4.0, 400), bare=Timing(2.0, 200)).ratio == 1.0


def test_median_and_quartiles_of_five_numbers_are_the_middle_ones() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_the_ratio_is_taken_round_by_round() -> None:
    """Between the rounds the machine becomes ten times slower; the ratio of the medians would be 5.5 / 5.95."""
    fast = Round(ours=Timing(1.0, 10), bare=Timing(1.0, 10))
    slow = Round(ours=Timing(10.0, 10), bare=Timing(10.0, 19))
    found = Comparison("update", "Megatron", [fast, slow, fast])
    assert found.ratio.median == 1.0
    assert found.ratio.low == pytest.approx((1.0 + 10 / 19) / 2)


@pytest.mark.parametrize(("ratio", "met"), [(0.89, False), (0.9, True), (1.2, True)])
def test_the_target_is_met_from_ninety_percent_on(ratio: float, met: bool) -> None:
    assert comparison(ratio).met is met


def test_sides_take_turns_in_going_first() -> None:
    assert list(orders(3)) == [(OURS, BARE), (BARE, OURS), (OURS, BARE)]


def test_the_first_round_only_warms_up() -> None:
    calls: list[str] = []
    progress: list[None] = []

    def side(name: str) -> Timing:
        calls.append(name)
        return Timing(float(len(calls)), 1)

    rounds = alternate(lambda: side(OURS), lambda: side(BARE), num_rounds=2, on_round=lambda: progress.append(None))
    assert calls == [OURS, BARE, BARE, OURS, OURS, BARE]
    assert [(one.ours.seconds, one.bare.seconds) for one in rounds] == [(4.0, 3.0), (5.0, 6.0)]
    assert len(progress) == 3


def test_shares_leave_out_inner_phases_and_name_the_rest() -> None:
    steps = [
        {"time/rollout": 2.0, "time/update": 1.0, "time/update/actor": 1.0, "time/step": 4.0, "reward/mean": 0.5},
        {"time/rollout": 4.0, "time/update": 1.0, "time/update/actor": 1.0, "time/step": 6.0, "reward/mean": 0.5},
    ]
    found = {phase.name: (phase.seconds, phase.share) for phase in phases(steps)}
    assert found == {"rollout": (3.0, 0.6), "update": (1.0, 0.2), REST: (1.0, 0.2)}


def test_phases_that_overlap_on_other_ranks_leave_no_negative_rest() -> None:
    found = phases([{"time/rollout": 2.0, "time/update": 2.0, "time/step": 3.0}])
    assert [(phase.name, phase.share) for phase in found] == [("rollout", 0.5), ("update", 0.5), (REST, 0.0)]


def test_a_phase_of_some_steps_only_counts_for_those() -> None:
    found = phases([{"time/save": 1.0, "time/step": 1.0}, {"time/step": 3.0}])
    assert [(phase.name, phase.share) for phase in found] == [("save", 0.25), (REST, 0.75)]


def test_tables_show_what_was_measured() -> None:
    text = shown(phase_table(phases([{"time/rollout": 1.5, "time/step": 2.0}]), num_steps=1))
    assert "rollout" in text and "1.500 s" in text and "75.0%" in text
    text = shown(comparison_table([comparison(0.95, 0.96, 0.97), comparison(0.5)]))
    assert "96.0% (96% to 96%)" in text and "met" in text and "missed" in text


def test_the_file_holds_every_round() -> None:
    found = phases([{"time/rollout": 1.5, "time/step": 2.0}])
    data = json.loads(json.dumps(as_data(found, [comparison(0.5, 1.0)], {"ranks": 2})))
    assert data["ranks"] == 2
    assert data["phases"][0] == {"name": "rollout", "seconds": 1.5, "share": 0.75}
    (one,) = data["comparisons"]
    assert one["ratio"] == {"median": 0.75, "low_quartile": 0.625, "high_quartile": 0.875}
    assert (one["target"], one["met"]) == (0.9, False)
    assert one["rounds"][0] == {"ours": {"seconds": 2.0, "tokens": 100}, "bare": {"seconds": 1.0, "tokens": 100}}


def test_a_bare_engine_that_does_not_start_shows_its_log(tmp_path) -> None:
    log_path = tmp_path / "engine.log"
    engine = BareEngine(server_args={}, cores=[], environment={"PYTHONPATH": str(tmp_path)}, log_path=log_path)
    (tmp_path / "sglang.py").write_text("raise RuntimeError('no such machine')\n")
    try:
        with pytest.raises(RuntimeError, match=r"(?s)engine\.log.*no such machine"):
            engine.wait_ready()
    finally:
        engine.stop()


def test_the_benchmark_trains_one_step_more_than_it_measures_and_evaluates_nothing() -> None:
    given = bench_step.parse(["--config", "x.yaml", "--steps", "3", "eval.every=5", "train.steps=99"])
    config = Path(__file__).parents[3] / "yaml_configs" / "quickstart_grpo.yaml"
    cfg = bench_step.load(config, bench_step.overrides(given))
    assert (cfg.train.steps, cfg.eval.sets, cfg.checkpoint.export) == (4, {}, False)


def test_settings_may_stand_before_and_after_options() -> None:
    given = bench_step.parse(["train.epochs=2", "--config", "x.yaml", "rollout.tensor=2", "--json", "out.json"])
    assert given.overrides == ["train.epochs=2", "rollout.tensor=2"]


def test_a_wrong_config_starts_nothing(capsys, monkeypatch, make_config) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert bench_step.main(["--config", str(make_config()), "--ranks", "3", "rollout.tensor=2"]) == 2
    assert "nothing was started" in (err := capsys.readouterr().err) and "rollout.tensor" in err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--steps", "0"],
        ["--rounds", "-1"],
        ["--fail-below", "much"],
        ["--json", "no/such/directory/x.json"],
        ["--nonsense"],
    ],
)
def test_a_wrong_option_is_a_mistake_of_the_command_line(wrong: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench_step.parse(["--config", "x.yaml", *wrong])
    assert exit_.value.code == 2
    assert wrong[0] in capsys.readouterr().err
