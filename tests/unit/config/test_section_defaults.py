"""A section has one set of defaults, wherever it stands: pydantic fills a partly given one from its class."""

from __future__ import annotations

from rlmegatron.config.schema import RunConfig
from rlmegatron.config.section import Section


def sections(owner: type[Section], path: str) -> list[tuple[str, object, type[Section]]]:
    found: list[tuple[str, object, type[Section]]] = []
    for name, field in owner.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found += [(path + name, field.default, kind)] * (not field.is_required())
            found += sections(kind, f"{path}{name}.")
    return found


def test_the_default_of_a_section_is_that_of_its_class() -> None:
    found = sections(RunConfig, "")
    assert len(found) > 10
    assert [path for path, default, kind in found if default != kind()] == []
