"""The JSON schema that editors use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rlmegatron.config import yaml_text
from rlmegatron.config.load import dump, load
from rlmegatron.config.schema_json import json_schema, schema_text

SCHEMA_FILE = Path(__file__).parents[3] / "yaml_configs" / "schema.json"


def properties(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for model in [node, *node["$defs"].values()]:
        yield from model["properties"].items()


def test_the_schema_file_is_current() -> None:
    message = "run: python -m rlmegatron schema > yaml_configs/schema.json"
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), message


def test_every_key_is_described_and_none_is_titled_by_its_own_name() -> None:
    schema = json_schema()
    for name, node in properties(schema):
        # pydantic leaves out a key's sentence where its section opens with the same one.
        section = schema["$defs"].get(node.get("$ref", "").rpartition("/")[2], {})
        described = node.get("description", section.get("description", ""))
        assert described.endswith("."), f"{name} has no description"
        assert not isinstance(node.get("title"), str), f"{name} has a title"


def test_a_section_with_defaults_of_its_own_shows_them_under_its_keys() -> None:
    """An editor reads the default of a key where the key is defined, and may not look at that of the whole section."""
    schema = json_schema()
    for _, node in properties(schema):
        if "$ref" in node and "default" in node:
            keys = schema["$defs"][node["$ref"].rpartition("/")[2]]["properties"]
            assert node["default"] == {key: below["default"] for key, below in keys.items()}


def test_a_resolved_config_is_valid(make_config: Callable[..., Path]) -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    values = yaml_text.parse(dump(load(make_config())), source="s").value
    jsonschema.validate(values, json_schema())


@pytest.mark.parametrize(
    "change",
    [
        {"seeed": 1},
        {"seed": -1},
        {"train": {"steps": 0}},
        {"rollout": {"temperature": 0}},
        {"model": {"dtype": "fp16"}},
    ],
)
def test_the_schema_refuses_what_load_refuses(make_config: Callable[..., Path], change: dict[str, Any]) -> None:
    values = yaml_text.parse(dump(load(make_config())), source="s").value
    for key, value in change.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, json_schema())
