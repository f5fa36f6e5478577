"""Turns one answer of SGLang into a `Sample`.

In: decoded JSON of `/generate`. Out: `Sample`. Must never import torch or sglang, and never make tokens from text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlmegatron.rollout.api import EngineError, GenerationRequest
from rlmegatron.types import Sample


def to_sample(
    request: GenerationRequest, answer: dict[str, Any], decode: Callable[[Sequence[int]], str] | None
) -> Sample:
    """The sample an answer holds; raises EngineError when its parts do not belong together."""
    token_ids = tuple(answer["output_ids"])
    meta = answer["meta_info"]
    scored = meta["output_token_logprobs"]
    if tuple(entry[1] for entry in scored) != token_ids:
        raise EngineError(
            f"prompt {request.prompt_id}: the engine scored {[entry[1] for entry in scored]} but sampled {token_ids}"
        )
    return Sample(
        prompt_id=request.prompt_id,
        index=request.index,
        token_ids=token_ids,
        logprobs=tuple(entry[0] for entry in scored),
        weight_versions=versions_per_token(meta["weight_versions"], num_tokens=len(token_ids)),
        finish_reason=meta["finish_reason"]["type"],
        text=decode(token_ids) if decode is not None else "",
    )


def versions_per_token(spans: Sequence[dict[str, Any]], *, num_tokens: int) -> tuple[int, ...]:
    """The weight version of every token, from SGLang's spans (version, start, end) that cover the answer in order."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) and span["end"] > span["start"]:
            raise EngineError(f"weight versions leave a gap at token {len(versions)}: {list(spans)}")
        versions.extend([int(span["version"])] * (span["end"] - span["start"]))
    if len(versions) != num_tokens:
        raise EngineError(f"weight versions cover {len(versions)} of {num_tokens} tokens: {list(spans)}")
    return tuple(versions)
