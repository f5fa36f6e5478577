"""What SGLang's own loaders ask of whoever hands them tensors piece by piece.

In: buckets of named tensors in any order. Out: buckets that `load_weights` can take one after another. Must never look
into a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.decoder_rules import EMBEDDING, HEAD

_OWN_HEAD = ("Qwen3MoeForCausalLM", "MixtralForCausalLM")
_QUERIES, _KEYS = ".q_a_proj.", ".kv_a_proj_with_mqa."

T = TypeVar("T")


def has_own_head(arch: Architecture) -> bool:
    """Whether SGLang's class has an `lm_head` of its own even where embeddings are tied."""
    return arch.name in _OWN_HEAD


def loadable(buckets: Iterable[list[tuple[str, T]]], arch: Architecture) -> Iterator[list[tuple[str, T]]]:
    """The same tensors in buckets that can be loaded one by one.

    SGLang fuses the projections of queries and keys into latent space and forgets, at the end of a call, one whose
    partner has not come: the first is held back until the second is there. A tied embedding is sent as the head too
    where SGLang's class needs that.
    """
    waiting: dict[str, T] = {}
    for bucket in buckets:
        ready: list[tuple[str, T]] = []
        for name, tensor in bucket:
            partner = _partner(name) if arch.latent and arch.latent.q_rank else None
            if partner is not None and partner not in waiting:
                waiting[name] = tensor
                continue
            if partner is not None:
                ready.append((partner, waiting.pop(partner)))
            ready.append((name, tensor))
            if name == EMBEDDING and arch.tied_embeddings and has_own_head(arch):
                ready.append((HEAD, tensor))
        yield ready
    assert not waiting, f"the stream ended without the partners of {sorted(waiting)}"


def _partner(name: str) -> str | None:
    if _QUERIES in name:
        return name.replace(_QUERIES, _KEYS)
    return name.replace(_KEYS, _QUERIES) if _KEYS in name else None
