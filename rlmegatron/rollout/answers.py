"""Turns one answer of SGLang into a `Sample`.

In: decoded JSON of `/generate`. Out: `Sample`. Must never import torch or sglang, and never make tokens from text.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlmegatron.rollout.api import EngineError, GenerationRequest, RoutedLayers
from rlmegatron.types import RoutedExperts, Sample


def to_sample(
    request: GenerationRequest,
    answer: dict[str, Any],
    decode: Callable[[Sequence[int]], str] | None,
    *,
    routed: RoutedLayers | None = None,
) -> Sample:
    """The sample an answer holds, with the experts of `routed` layers if asked for.

    Raises EngineError when its parts do not belong together, or a log-probability is no finite number.
    """
    token_ids = tuple(answer["output_ids"])
    meta = answer["meta_info"]
    scored = meta["output_token_logprobs"]
    if tuple(entry[1] for entry in scored) != token_ids:
        raise EngineError(
            f"prompt {request.prompt_id}: the engine scored {[entry[1] for entry in scored]} but sampled {token_ids}"
        )
    logprobs = tuple(entry[0] for entry in scored)
    for place, logp in enumerate(logprobs):
        # JSON has no NaN: it arrives as null. Let through, it would take its token out of the loss unseen.
        if logp is None or not math.isfinite(logp):
            raise EngineError(
                f"prompt {request.prompt_id}, sample {request.index}: the engine's log-probability of token {place} "
                f"is {logp}, must be a finite number"
            )
    experts = None
    if routed is not None:
        experts = routed_experts(request, meta["routed_experts"], routed, num_answer_tokens=len(token_ids))
    return Sample(
        prompt_id=request.prompt_id,
        index=request.index,
        token_ids=token_ids,
        logprobs=logprobs,
        weight_versions=versions_per_token(meta["weight_versions"], num_tokens=len(token_ids)),
        finish_reason=meta["finish_reason"]["type"],
        text=decode(token_ids) if decode is not None else "",
        routed_experts=experts,
    )


def routed_experts(
    request: GenerationRequest, encoded: str, routed: RoutedLayers, *, num_answer_tokens: int
) -> RoutedExperts:
    """Experts in the layers that have some, from SGLang's base64 of int32 [tokens but the last, all layers, top_k]."""
    num_tokens = len(request.token_ids) + num_answer_tokens - 1
    chosen = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    shape = (num_tokens, routed.num_layers, routed.top_k)
    if chosen.size != np.prod(shape):
        raise EngineError(
            f"prompt {request.prompt_id}: the engine names {chosen.size} experts, must be {shape} (tokens, layers, "
            "experts of a token)"
        )
    kept = chosen.reshape(shape)[:, list(routed.layers)].astype(np.int16)
    if routed.top_k > 1 and (kept[..., 0] == kept[..., 1]).any():
        # SGLang's table is 0 where nothing was noted, and some of its backends choose experts without noting them.
        raise EngineError(
            f"prompt {request.prompt_id}: the engine does not know the experts of every token; its MoE backend may not "
            "note them (rollout.engine_args.moe_runner_backend: use 'triton')"
        )
    return RoutedExperts(kept.tobytes(), num_tokens, len(routed.layers), routed.top_k)


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
