"""The quickstart's task, tokenizer and directory.

Where a whole warm-up lands, and that RL then learns, is shown end to end (tests/e2e/test_quickstart.py).
"""

import json
import random
from itertools import pairwise

import make_quickstart
import pytest
from quickstart import problems, report
from quickstart.problems import VARIANTS

from rlmegatron.platform.torchvision_ops import install_torchvision_hook

install_torchvision_hook()
from quickstart import tiny_model, warmup  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """As a user gets it: saved and loaded again."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_model.build_tokenizer().save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def draw(variant, num_problems, *, held_out, seed=0):
    rng = random.Random(seed)
    return [problems.draw_digits(rng, VARIANTS[variant], held_out=held_out) for _ in range(num_problems)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_test_answer_is_a_training_answer(variant):
    train = {problems.answer(digits) for digits in draw(variant, 3000, held_out=False)}
    test = {problems.answer(digits) for digits in draw(variant, 500, held_out=True)}
    assert not train & test


def test_a_tenth_of_the_five_digit_answers_is_held_out():
    answers = [f"{n:05d}" for n in range(100_000) if all(a <= b for a, b in pairwise(f"{n:05d}"))]
    assert len(answers) == 2002
    assert 0.08 < sum(map(problems.is_held_out, answers)) / 2002 < 0.12


def test_an_order_of_the_digits_never_changes_its_side():
    assert {problems.is_held_out(digits) for digits in ("31431", "11334", "43311")} == {problems.is_held_out("13134")}


def test_a_row_holds_the_problem_and_its_sorted_digits():
    assert problems.row("31431") == {"prompt": "31431=", "answer": "11334"}


def test_lengths_of_the_mixed_variant_are_equally_frequent():
    lengths = [len(digits) for digits in draw("mixed", 5000, held_out=False)]
    assert set(lengths) == {3, 4, 6, 7}
    assert all(abs(lengths.count(length) - 1250) < 141 for length in (3, 4, 6, 7))  # 4.6 standard deviations


def test_warmup_labels_have_the_stated_shares():
    rng = random.Random(0)
    labels = [problems.warmup_label(rng, VARIANTS["sort5"], "31431") for _ in range(5000)]
    assert labels.count("134") / 5000 == pytest.approx(0.6, abs=0.03)
    # A slip that swaps equal neighbours (2 of 4 places) and overwrites nothing is right: 0.1 * 0.5 * 0.5 more.
    assert 0.3 - 0.02 < labels.count("11334") / 5000 < 0.36
    assert all(len(label) == 5 for label in labels if label != "134")


def test_distinct_draws_are_distinct():
    drawn = problems.draw_distinct(random.Random(0), VARIANTS["mixed"], 512, held_out=True)
    assert len(set(drawn)) == 512
    assert all(map(problems.is_held_out, drawn))


def test_plain_text_and_a_chat_give_the_same_ids_with_one_bos(tokenizer):
    expected = [1, 6, 4, 7, 6, 4, 13]  # <bos> 3 1 4 3 1 =
    chat = [{"role": "user", "content": "31431="}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer("31431=")["input_ids"] == expected
    assert rendered == "<bos>31431="
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == expected
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == expected


def test_a_chat_with_an_answer_ends_in_eos(tokenizer):
    chat = [{"role": "user", "content": "31431="}, {"role": "assistant", "content": "11334"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<bos>31431=11334<eos>"


def test_ids_decode_to_the_text(tokenizer):
    ids = tokenizer("0123456789=", add_special_tokens=False)["input_ids"]
    assert ids == list(range(3, 14))
    assert tokenizer.decode(ids) == "0123456789="
    assert tokenizer.decode([*ids[:3], tokenizer.eos_token_id], skip_special_tokens=True) == "012"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_a_character_outside_the_alphabet_is_an_error(tokenizer):
    with pytest.raises(Exception, match="UNK"):
        tokenizer("3x4=")


def test_only_the_answer_and_its_eos_are_trained_on(tokenizer):
    input_ids, labels = warmup.draw_batch(random.Random(0), tokenizer, VARIANTS["mixed"])
    assert input_ids.shape == labels.shape
    assert input_ids.shape[0] == warmup.BATCH_SIZE
    for ids, wanted in zip(input_ids.tolist(), labels.tolist(), strict=True):
        start, end = ids.index(13) + 1, ids.index(2) + 1
        assert wanted[start:end] == ids[start:end]
        assert set(wanted[:start] + wanted[end:]) <= {warmup.IGNORED}
        assert set(ids[end:]) <= {tiny_model.PAD_ID}


def test_the_learning_rate_ramps_up_then_falls_to_its_floor():
    factors = [warmup.learning_rate_factor(step) for step in (0, 24, 49, 150, 299)]
    assert factors == pytest.approx([1 / 50, 0.5, 1 - 49 / 300, 0.5, 0.05])


@pytest.mark.parametrize("out_of_band", [0.19, 0.51])
def test_a_start_outside_the_band_is_refused(out_of_band):
    make_quickstart.check_band({"greedy": {"all": 0.2}, "sampled": {"all": 0.5}})
    with pytest.raises(ValueError, match=r"outside 0.20 to 0.50 \(held-out accuracy greedy 0.30, sampled"):
        make_quickstart.check_band({"greedy": {"all": 0.3}, "sampled": {"all": out_of_band}})


def test_something_else_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert make_quickstart.main(["--out", str(tmp_path)]) == 1
    assert "was not made by this tool" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_finished_directory_is_reused_only_for_its_own_settings(tmp_path, capsys):
    settings = {"recipe": make_quickstart.RECIPE, "variant": "sort5", "seed": 7, "threads": 2}
    held_out = {"greedy": {"all": 0.31}, "sampled": {"all": 0.35}}
    manifest = tmp_path / make_quickstart.MANIFEST
    manifest.write_text(json.dumps({"settings": settings, "held_out": held_out}))
    assert make_quickstart.main(["--out", str(tmp_path), "--seed", "7"]) == 0
    assert "is there already (held-out accuracy greedy 0.31, sampled 0.35)" in capsys.readouterr().out
    assert make_quickstart.main(["--out", str(tmp_path), "--seed", "8"]) == 1
    assert "seed 7, threads 2, not" in capsys.readouterr().err


def test_a_stopped_run_leaves_nothing_behind(tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "warm_up", stop)
    with pytest.raises(KeyboardInterrupt):
        make_quickstart.main(["--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_the_last_line_compares_the_first_and_the_last_evaluation(tmp_path):
    name = "eval/test/greedy_accuracy"
    rows = [
        {"step": 0, name: 0.314, "eval/test/num_prompts": 512},
        {"step": 1, "reward/mean": 0.4},
        {"step": 20, name: 0.8, "eval/test/num_prompts": 512},
        {"step": 60, name: 0.957, "eval/test/num_prompts": 512},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report.report(tmp_path, seconds=83) == (
        f"quickstart: accuracy 0.31 -> 0.96 on 512 held-out problems, 60 steps, 83 s, run {tmp_path}"
    )


def test_a_run_without_a_second_evaluation_has_no_last_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/test/greedy_accuracy": 0.3, "eval/test/num_prompts": 5}\n'
    )
    with pytest.raises(ValueError, match="at two steps or more, it has 1"):
        report.report(tmp_path, seconds=1)


def test_two_runs_of_one_seed_write_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(warmup, "NUM_STEPS", 4)
    monkeypatch.setattr(make_quickstart, "NUM_TEST", 32)
    monkeypatch.setattr(make_quickstart, "NUM_TRAIN", 64)
    monkeypatch.setattr(make_quickstart, "START_BAND", (0.0, 1.0))
    for name in ("first", "second"):
        assert make_quickstart.main(["--out", str(tmp_path / name)]) == 0
    first, second = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("first", "second")
    )
    assert {"train.jsonl", "test.jsonl", "quickstart.json"} < {str(path) for path in first}
    assert first == second
