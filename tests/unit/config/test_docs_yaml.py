"""What the documentation shows as configuration is configuration: its blocks load, and the keys that it names exist.

In: the YAML blocks and the inline keys of README.md and docs/*.md. Out: failures that name file and line. What a block
would do to a run is not tested here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.config import rules, yaml_text
from rlmegatron.config.load import ConfigError, load
from rlmegatron.config.schema import RunConfig
from rlmegatron.config.section import Section
from rlmegatron.rewards.table import resolve

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
NOT_CONFIGURATION: Mapping[str, str] = {}
"""First line of a block -> why it is not loaded."""
MINIMAL = {
    "name": "docs",
    "model": {"path": "model"},
    "data": {"train": [{"path": "train.jsonl"}]},
    "train": {"steps": 1000},
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([a-z]+(?:\.[a-z_]+)+)(?=[`:])")
FOREIGN = "migration.md"
"""In the table of this page the first column has the names of other libraries, which its text explains."""


@dataclass(frozen=True)
class Block:
    """The text of a fenced YAML block, and where it starts."""

    where: str
    text: str


def yaml_blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            language, body = found.groups()
            if language in ("yaml", "yml") and body.splitlines()[0] not in NOT_CONFIGURATION:
                line = text.count("\n", 0, found.start()) + 1
                yield Block(f"{page.name}:{line}", body)


BLOCKS = list(yaml_blocks())


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(over[key], dict)}
    return {**base, **over, **both}


def as_config(block: Block, tmp_path: Path) -> RunConfig:
    """`block` over the smallest configuration."""
    parsed = yaml_text.parse(block.text, source=block.where)
    assert parsed.problems == []
    path = tmp_path / "run.yaml"
    path.write_text(yaml_text.dump(merged(MINIMAL, parsed.value)), encoding="utf-8")
    return load(path)


def inline_keys(page: Path) -> Iterator[tuple[int, str]]:
    """Line and key of every `section.key` in the running text and the tables of `page`."""
    text = FENCE.sub(lambda found: "\n" * found.group().count("\n"), page.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), start=1):
        if page.name == FOREIGN:
            line = line.split(" | ", 1)[-1] if line.startswith("| ") else ""
        for key in INLINE.findall(line):
            if key.partition(".")[0] in RunConfig.model_fields and not key.endswith(".py"):
                yield number, key


def is_key(name: str) -> bool:
    section: Any = RunConfig
    for part in name.split("."):
        if not (isinstance(section, type) and issubclass(section, Section)):
            return True  # a name of the user's own, in a mapping
        if part not in section.model_fields:
            return False
        section = section.model_fields[part].annotation
    return True


def test_the_documentation_has_blocks_and_keys() -> None:
    assert len(BLOCKS) >= 8
    assert len([key for page in PAGES for _, key in inline_keys(page)]) > 50


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_every_block_loads_and_breaks_no_rule(block: Block, tmp_path: Path) -> None:
    cfg = as_config(block, tmp_path)
    assert rules.problems(cfg, world_size=None, card=None) == []
    assert rules.warnings(cfg, world_size=None, card=None) == []
    if ":" not in cfg.reward.name:
        resolve(cfg.reward.name, cfg.reward.args)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_that_a_page_names_is_in_the_schema(page: Path) -> None:
    assert [(line, key) for line, key in inline_keys(page) if not is_key(key)] == []


def test_a_block_with_a_key_that_is_not_there_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="algorithm.clip_hgh: unknown key"):
        as_config(Block("here", "algorithm: {clip_hgh: 0.3}\n"), tmp_path)
    assert not is_key("algorithm.clip_hgh")
    assert is_key("eval.sets.anything")
