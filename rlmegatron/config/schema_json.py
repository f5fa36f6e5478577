"""The JSON schema of a config file, which editors use to complete and check YAML.

In: nothing. Out: the schema as a dict or as the text of `yaml_configs/schema.json`. Must never import torch.
"""

from __future__ import annotations

import json
from typing import Any

from rlmegatron.config.schema import RunConfig

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema with a description and a default under every key; unknown keys are errors, as they are to `load`."""
    schema = _without_titles(RunConfig.model_json_schema())
    assert isinstance(schema, dict), "a schema is a mapping"
    return {"$schema": _DIALECT, "title": "rlmegatron run", **schema}


def schema_text() -> str:
    """The content of `yaml_configs/schema.json`."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _without_titles(node: Any) -> Any:
    """pydantic titles every key with its own name in capitals, which editors show in place of the description."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value) for key, value in node.items() if not (key == "title" and isinstance(value, str))
    }
