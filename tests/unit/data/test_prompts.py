"""The prompt stream: order, weights, dropped prompts and resuming."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlmegatron.config.schema import DataConfig
from rlmegatron.data.prompts import PromptStream, read_all

Make = Callable[..., Any]


def rows(num: int, tag: str = "a") -> list[dict[str, Any]]:
    return [{"prompt": f"{tag}{index}", "answer": index} for index in range(num)]


def config(*paths: str | tuple[str, float], **options: Any) -> DataConfig:
    pairs = [(one, 1.0) if isinstance(one, str) else one for one in paths]
    train = [{"path": path, "weight": weight} for path, weight in pairs]
    return DataConfig(**{"train": train, "chat_template": False, **options})


def stream(make_tokenizer: Make, data: DataConfig, *, seed: int = 1, max_prompt_tokens: int = 100) -> PromptStream:
    return PromptStream(data, make_tokenizer(), seed=seed, max_prompt_tokens=max_prompt_tokens)


def texts(prompts: Any) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_an_epoch_has_every_prompt_once_and_the_next_another_order(make_tokenizer: Make, write_jsonl: Make) -> None:
    drawn = texts(stream(make_tokenizer, config(write_jsonl(rows(30)))).take(60))
    everything = [row["prompt"] for row in rows(30)]
    assert sorted(drawn[:30]) == sorted(drawn[30:]) == sorted(everything)
    assert drawn[:30] != everything and drawn[30:] != everything and drawn[:30] != drawn[30:]


def test_the_seed_alone_decides_the_order(make_tokenizer: Make, write_jsonl: Make) -> None:
    first, second = (config(write_jsonl(rows(30), name)) for name in ("a.jsonl", "b.jsonl"))
    assert texts(stream(make_tokenizer, first).take(50)) == texts(stream(make_tokenizer, second).take(50))
    assert texts(stream(make_tokenizer, first).take(30)) != texts(stream(make_tokenizer, first, seed=2).take(30))


def test_without_shuffling_rows_come_in_file_order(make_tokenizer: Make, write_jsonl: Make) -> None:
    data = config(write_jsonl(rows(3)), shuffle=False)
    assert texts(stream(make_tokenizer, data).take(7)) == ["a0", "a1", "a2", "a0", "a1", "a2", "a0"]


def test_a_row_drawn_twice_is_two_prompts(make_tokenizer: Make, write_jsonl: Make) -> None:
    source = stream(make_tokenizer, config(write_jsonl(rows(1))))
    first, second = source.take(1) + source.take(1)
    assert (first.id, second.id) == (0, 1)
    assert first.text == second.text and first.row == {"prompt": "a0", "answer": 0}
    assert first.source.endswith("train.jsonl line 1")


def test_weights_hold_at_every_moment(make_tokenizer: Make, write_jsonl: Make) -> None:
    data = config((write_jsonl(rows(5), "a.jsonl"), 3.0), (write_jsonl(rows(50, "b"), "b.jsonl"), 1.0))
    drawn = texts(stream(make_tokenizer, data).take(400))
    for end in range(1, 401):
        share = Counter(text[0] for text in drawn[:end])
        assert abs(share["a"] - 0.75 * end) <= 1
    assert Counter(drawn)["a0"] == 60


def test_over_long_prompts_are_dropped_and_counted_once(make_tokenizer: Make, write_jsonl: Make) -> None:
    path = write_jsonl([{"prompt": "a" * length} for length in (1, 9, 5, 6, 2)])
    other = write_jsonl(rows(3), "other.jsonl")
    source = stream(make_tokenizer, config(path, other, shuffle=False), max_prompt_tokens=5)
    assert source.notices == (f"{path}: dropped 2 of 5 prompts, longer than 5 tokens (the longest has 9)",)
    assert source.num_prompts == 6
    assert {text for text in texts(source.take(12)) if set(text) == {"a"}} == {"a", "aaaaa", "aa"}


def test_the_length_counts_template_and_bos(make_tokenizer: Make, write_jsonl: Make) -> None:
    data = config(write_jsonl([{"prompt": "aa"}, {"prompt": "aaa"}]), chat_template=True)
    source = PromptStream(data, make_tokenizer(adds_bos=True), seed=0, max_prompt_tokens=5)
    (prompt,) = source.take(1)
    assert prompt.text == "<|user|>aa<|assistant|>" and len(prompt.token_ids) == 5


def test_a_file_without_a_short_enough_prompt_is_an_error(make_tokenizer: Make, write_jsonl: Make) -> None:
    path = write_jsonl([{"prompt": "aaaa"}, {"prompt": "aaa"}])
    with pytest.raises(ValueError, match=r"train.jsonl: all 2 prompts are longer than 2 tokens \(the shortest has 3\)"):
        stream(make_tokenizer, config(path), max_prompt_tokens=2)


def test_a_broken_row_anywhere_is_an_error_at_construction(make_tokenizer: Make, write_jsonl: Make) -> None:
    path = write_jsonl([*rows(2000), {"question": "q"}])
    with pytest.raises(ValueError, match=r"train.jsonl line 2001: no field 'prompt'; it has 'question' \(set data.p"):
        stream(make_tokenizer, config(path))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.integers(0, 60), num=st.integers(1, 40), weight=st.floats(0.1, 10.0), seed=st.integers(0, 2**40))
def test_a_resumed_stream_goes_on_with_the_same_draws(
    make_tokenizer: Make, write_jsonl: Make, before: int, num: int, weight: float, seed: int
) -> None:
    data = config((write_jsonl(rows(7), "a.jsonl"), 1.0), (write_jsonl(rows(11, "b"), "b.jsonl"), weight))
    original = stream(make_tokenizer, data, seed=seed)
    original.take(before)
    state = json.loads(json.dumps(original.state()))
    resumed = stream(make_tokenizer, data, seed=seed)
    resumed.take(3)
    resumed.load_state(state)
    assert resumed.take(num) == original.take(num)
    assert resumed.state() == original.state()


def test_a_cursor_of_other_data_is_refused(make_tokenizer: Make, write_jsonl: Make) -> None:
    path = write_jsonl(rows(9))
    data = config(path)
    state = stream(make_tokenizer, data).state()

    def resume(data: DataConfig = data, **options: Any) -> None:
        stream(make_tokenizer, data, **options).load_state(state)

    resume()
    with pytest.raises(ValueError, match="data cursor: seed was 1 and is now 2"):
        resume(seed=2)
    with pytest.raises(ValueError, match="data cursor: shuffle was True and is now False"):
        resume(config(path, shuffle=False))
    with pytest.raises(ValueError, match=r"data.train had 1 files \(.*train.jsonl\), not 2"):
        resume(config(path, path))
    with pytest.raises(ValueError, match="train.jsonl: its weight was 1 before the checkpoint, now 2"):
        resume(config((path, 2.0)))
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in [*rows(8), {"prompt": "x8", "answer": 8}]))
    with pytest.raises(ValueError, match="train.jsonl: the file has changed since the checkpoint"):
        resume()


def test_a_cursor_of_another_length_bound_is_refused(make_tokenizer: Make, write_jsonl: Make) -> None:
    data = config(write_jsonl([{"prompt": "a"}, {"prompt": "aaaa"}]))
    state = stream(make_tokenizer, data).state()
    with pytest.raises(ValueError, match=r"train.jsonl: 2 prompts were short enough .* data.max_prompt_tokens"):
        stream(make_tokenizer, data, max_prompt_tokens=2).load_state(state)


def test_a_file_that_only_moved_may_be_resumed(make_tokenizer: Make, write_jsonl: Make) -> None:
    original = stream(make_tokenizer, config(write_jsonl(rows(9), "old.jsonl")))
    original.take(5)
    moved = stream(make_tokenizer, config(write_jsonl(rows(9), "new.jsonl")))
    moved.load_state(original.state())
    assert texts(moved.take(20)) == texts(original.take(20))


def test_an_evaluation_set_is_read_whole_and_in_order(make_tokenizer: Make, write_jsonl: Make) -> None:
    path = write_jsonl(rows(4), "eval.jsonl")
    prompts = read_all(path, make_tokenizer(), config(path), max_prompt_tokens=9, first_id=100)
    assert texts(prompts) == ["a0", "a1", "a2", "a3"]
    assert [prompt.id for prompt in prompts] == [100, 101, 102, 103]
    assert prompts[2].row == {"prompt": "a2", "answer": 2}


def test_an_over_long_evaluation_prompt_is_an_error(make_tokenizer: Make, write_jsonl: Make) -> None:
    path = write_jsonl([{"prompt": "a"}, {"prompt": "aaa"}], "eval.jsonl")
    with pytest.raises(ValueError, match="eval.jsonl line 2: the prompt has 3 tokens, allowed are 2; every prompt"):
        read_all(path, make_tokenizer(), config(path), max_prompt_tokens=2)
