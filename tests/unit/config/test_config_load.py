"""Reading a config: YAML, overrides, defaults, and one line for every mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.config import yaml_text
from rlmegatron.config.load import ConfigError, dump, load
from rlmegatron.config.schema import RunConfig

MINIMAL = """\
name: tiny
model: {path: m}
data:
  train:
    - path: t.jsonl
train:
  steps: 3
"""

TRAIN = "train has steps, mini_batches, epochs, split, max_kl, micro_batch_tokens, resume, collective_timeout_s"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(path, overrides)
    return list(raised.value.problems)


def test_minimal_file_takes_every_default_of_the_schema(tmp_path: Path) -> None:
    cfg = load(write(tmp_path, MINIMAL))
    expected = RunConfig.model_validate(
        {"name": "tiny", "model": {"path": "m"}, "data": {"train": [{"path": "t.jsonl"}]}, "train": {"steps": 3}}
    )
    assert cfg == expected


def test_a_partly_given_section_keeps_the_defaults_of_its_own_place(tmp_path: Path) -> None:
    cfg = load(write(tmp_path, MINIMAL + "critic: {optimizer: {clip_grad: 0.5}}\n"))
    assert cfg.critic.optimizer.lr == 5e-6 != cfg.actor.optimizer.lr
    assert cfg.critic.optimizer.clip_grad == 0.5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        (".5", 0.5),
        ("3.", 3.0),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("on", "on"),
        ("yes", "yes"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'1e-6'", "1e-6"),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    parsed = yaml_text.parse(f"key: {text}\n", source="s").value["key"]
    assert parsed == value and type(parsed) is type(value)


def test_a_float_without_a_dot_works_in_file_and_override(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "actor:\n  optimizer:\n    lr: 2e-5\n")
    assert load(path).actor.optimizer.lr == 2e-5
    assert load(path, ["actor.optimizer.lr=3e-4"]).actor.optimizer.lr == 3e-4


def test_every_mistake_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: a b\nmodel:\n  path: 3\nrollout:\n  top_p: 2.0\nalgorithm:\n  clip_hgh: 0.3\ntrain:\n  steps: 1.5\n",
    )
    assert problems_of(path) == [
        f"name: 'a b' is not allowed; use text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$ ({path} line 1)",
        f"model.path: 3 is not allowed; use text ({path} line 3)",
        f"rollout.top_p: 2.0 is not allowed; use a number above 0 and at most 1 ({path} line 5)",
        "data.train: missing; give a list of at least 1 of: a section with keys from path, weight: "
        f"Files of training prompts. ({path})",
        f"algorithm.clip_hgh: unknown key; did you mean algorithm.clip_high? ({path} line 7)",
        f"train.steps: 1.5 is not allowed; use a whole number above 0 ({path} line 9)",
    ]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("algorithm.clip_hgh=1", "unknown key; did you mean algorithm.clip_high?"),
        ("lr=1", "unknown key; did you mean actor.optimizer.lr or critic.optimizer.lr?"),
        ("train.mini_batch=2", f"unknown key; did you mean train.mini_batches? {TRAIN}"),
        ("train.temperature=1", f"unknown key; did you mean rollout.temperature or eval.temperature? {TRAIN}"),
        ("rollout.prompt_per_step=2", "unknown key; did you mean rollout.prompts_per_step?"),
        ("algoritm=1", "unknown key; did you mean algorithm?"),
        ("reward.zzz=1", "unknown key; reward has name, args, timeout_s, workers, on_error, error_score, clip, whiten"),
        ("model.path.x=1", "model.path is not a section"),
        ("data.train.0.path=x", "data.train is a list and is replaced as a whole: data.train='[...]'"),
        ("algorithm.kl.where=l", "'l' is not allowed; use 'none', 'reward' or 'loss'"),
        ("algorithm.clip_low=-1", "-1 is not allowed; use a number above 0 and at most 1"),
        ("algorithm.lam=-1", "-1 is not allowed; use a number of at least 0 and at most 1"),
        ("algorithm.whiten=1", "1 is not allowed; use true, false or null"),
        ("rollout.dtype=fp16", "'fp16' is not allowed; use 'bf16', 'fp32' or null"),
        ("rollout.temperature=-1", "-1 is not allowed; use a number above 0"),
        ("seed=-1", "-1 is not allowed; use a whole number of at least 0"),
        ("rollout.context_length=x", "'x' is not allowed; use a whole number above 0 or null"),
        ("rollout.temperature=.inf", "inf is not allowed; use a finite number"),
        ("actor.optimizer.betas=[0.9]", "[0.9] is not allowed; use a list of 2: a number, a number"),
        ("rollout.stop_token_ids=a", "'a' is not allowed; use a list of a whole number"),
        ("rollout.engine_args.a={}", "{} is not allowed; use text, a whole number, a number, true or false"),
        ("eval.sets.test=3", "3 is not allowed; use text"),
        ("actor=", "an empty section is not allowed; use a section with keys from optimizer"),
        ("data.train=[]", "[] is not allowed; use a list of at least 1 of: a section with keys from path, weight"),
        ("parallel.sequence=1", "1 is not allowed; use true or false"),
    ],
)
def test_a_mistake_gives_one_line_that_says_where_what_and_what_is_allowed(
    tmp_path: Path, override: str, complaint: str
) -> None:
    key = override.partition("=")[0]
    assert problems_of(write(tmp_path, MINIMAL), override) == [f"{key}: {complaint} (command line)"]


@pytest.mark.parametrize("override", ["train.steps", "train..steps=1", "=1"])
def test_a_malformed_override_is_quoted(tmp_path: Path, override: str) -> None:
    assert problems_of(write(tmp_path, MINIMAL), override) == [
        f"override '{override}': not of the form section.key=value (command line)"
    ]


def test_a_mistake_inside_a_list_names_the_item(tmp_path: Path) -> None:
    overrides = ("rollout.stop_token_ids=[1, a]", "data.train=[{path: x}, {path: y, wait: 2}]", "algoritm.lam=1")
    assert problems_of(write(tmp_path, MINIMAL), *overrides) == [
        "rollout.stop_token_ids[1]: 'a' is not allowed; use a whole number (command line)",
        "data.train[1].wait: unknown key; did you mean data.train[1].weight? data.train[1] has path, weight "
        "(command line)",
        "algoritm: unknown key; did you mean algorithm? (command line)",
    ]


def test_a_dotted_key_in_the_file_is_explained(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "algorithm.clip_high: 0.3\n")
    assert problems_of(path) == [
        f"algorithm.clip_high: unknown key; write 'clip_high' indented below 'algorithm:' ({path} line 8)"
    ]


def test_duplicate_keys_are_an_error_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "seed: 1\nrollout:\n  top_k: 1\n  top_k: 2\nseed: 2\n")
    assert problems_of(path) == [
        f"rollout.top_k: given twice, on lines 10 and 11; keep one ({path})",
        f"seed: given twice, on lines 8 and 12; keep one ({path})",
    ]


def test_overrides_replace_lists_set_free_keys_and_the_last_one_wins(tmp_path: Path) -> None:
    overrides = [
        "rollout.stop_token_ids=[1,2]",
        "rollout.stop_token_ids=[7]",
        "critic.path=null",
        "eval.sets.test=file.jsonl",
        "eval.sets.v1.2=other.jsonl",
        "rollout.engine_args.foo=1",
        "rollout.engine_args.bar=true",
        "algorithm.kl={where: loss}",
        "reward.name=package.module:function",
        "data.train=[{path: a.jsonl}, {path: b.jsonl, weight: 2}]",
    ]
    cfg = load(write(tmp_path, MINIMAL), overrides)
    assert cfg.rollout.stop_token_ids == (7,)
    assert cfg.critic.path is None
    assert cfg.eval.sets == {"test": "file.jsonl", "v1.2": "other.jsonl"}
    assert cfg.rollout.engine_args == {"foo": 1, "bar": True}
    assert (cfg.algorithm.kl.where, cfg.algorithm.kl.coef) == ("loss", 0.001)
    assert cfg.reward.name == "package.module:function"
    assert [(source.path, source.weight) for source in cfg.data.train] == [("a.jsonl", 1.0), ("b.jsonl", 2.0)]


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = MINIMAL + "actor: {optimizer: &opt {lr: 1e-4}}\ncritic: {optimizer: {<<: *opt, clip_grad: 2}}\n"
    cfg = load(write(tmp_path, text))
    assert (cfg.critic.optimizer.lr, cfg.critic.optimizer.clip_grad) == (1e-4, 2.0)


ALIASES = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join(10 * [f'*a{i - 1}'])}]\n" for i in range(1, 10))
"""A thousand million values."""
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 120))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\n", "line 2: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a:\n\t- 1\n", "line 2: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: 1\nb: \f2\n", "line 2: not valid YAML: the character U+000C is not allowed"),
        ("a: 1\nb: !!bool x\n", "line 2: not valid YAML: 'x' cannot be read as !!bool"),
        ("a: 1\nb: !!float ''\n", "line 2: not valid YAML: '' cannot be read as !!float"),
        ("a: 1\nb: !!timestamp x\n", "line 2: not valid YAML: 'x' cannot be read as !!timestamp"),
        ("a: 1\nb: " + "1" * 5000, "line 2: not valid YAML: '1111"),
        ("a:\n " + "[" * 2000, "line 2: not valid YAML: nested more than 100 deep"),
        ("a: 1\nb: {{ model }}\n", "line 2: a mapping stands where a key or text should; put text that begins with a "),
        ("? [a]\n: 1\n", "line 1: a list stands where a key or text should; put text that begins with a brace or "),
        (ALIASES, "not valid YAML: its aliases stand for more than 100000 values"),
        (CHAIN, "not valid YAML: nested more than 100 deep"),
        ("1: a\n", "line 1: the key 1 is not text; put it in quotes"),
        ("a: &x [*x]\n", "line 1: an alias stands inside its own anchor"),
        ("a: !!python/object:os.system {}\n", "not valid YAML: could not determine a constructor"),
    ],
)
def test_broken_yaml_names_the_line(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    (problem,) = problems_of(path)
    assert problem.startswith(str(path)) and expected in problem


def test_a_control_character_of_an_override_is_shown_as_text(make_config: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(make_config(), ["name=\a"])
    assert caught.value.problems == (
        r"override 'name=\x07' line 1: not valid YAML: the character U+0007 is not allowed",
    )


def test_values_may_be_nested_as_deep_as_is_said() -> None:
    deep = "[" * 99 + "1" + "]" * 99
    assert yaml_text.parse(f"- {deep[1:-1]}", source="s").problems == []
    assert yaml_text.parse(f"- {deep}", source="s").problems != []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("reward.clip=[null,1]", ["reward.clip[0]: null is not allowed; use a number (command line)"]),
        ('reward.clip=[0,"1"]', ["reward.clip[1]: '1' is not allowed; use a number (command line)"]),
        (
            "reward.clip=[a,b]",
            [
                "reward.clip[0]: 'a' is not allowed; use a number (command line)",
                "reward.clip[1]: 'b' is not allowed; use a number (command line)",
            ],
        ),
    ],
)
def test_an_item_of_a_list_that_may_be_null_is_named(
    make_config: Callable[..., Path], given: str, expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(make_config(), [given])
    assert list(caught.value.problems) == expected


@pytest.mark.parametrize(("text", "shown"), [("- 1\n", "[1]"), ("3\n", "3")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, shown: str) -> None:
    path = write(tmp_path, text)
    assert problems_of(path) == [f"{path}: holds {shown}; a config is a mapping of sections"]


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    absent = tmp_path / "absent.yaml"
    assert problems_of(absent) == [f"{absent}: cannot read the config: No such file or directory"]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert problems_of(binary) == [f"{binary}: is not UTF-8 text (invalid start byte at byte 0)"]


def test_an_empty_file_names_every_required_key(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, ""))
    assert [line.split(":")[0] for line in found] == ["name", "model.path", "data.train", "train.steps"]
    assert all("missing; give " in line for line in found)


def test_dump_reads_back_as_the_same_config(make_config: Callable[..., Path], tmp_path: Path) -> None:
    cfg = load(make_config({"reward.args": {"a": "1e-6", "b": "on", "c": None, "d": 1e-6}, "eval.sets": {"yes": "x"}}))
    text = dump(cfg)
    assert load(write(tmp_path, text)) == cfg
    assert "'1e-6'" in text and "steps: 10" in text


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)))
def test_any_plain_values_survive_dump_and_parse(values: dict[str, object]) -> None:
    document = yaml_text.parse(yaml_text.dump(values), source="s")
    assert document.problems == []
    assert document.value == values
    assert [type(value) for value in document.value.values()] == [type(value) for value in values.values()]
