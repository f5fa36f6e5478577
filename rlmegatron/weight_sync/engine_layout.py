"""Where SGLang keeps each Hugging Face tensor of a decoder, under tensor parallelism.

In: an architecture and the engine's (TP size, rank). Out: boxes, as in `models/rules.py`. Pure; must never import torch
or sglang. Checked against SGLang's own classes by a test, and by digest after every publish.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.decoder_rules import EMBEDDING, HEAD
from rlmegatron.models.rules import Part
from rlmegatron.weight_sync.engine_attention import attention_placements
from rlmegatron.weight_sync.engine_loader import has_own_head
from rlmegatron.weight_sync.engine_mlp import mlp_placements
from rlmegatron.weight_sync.engine_placement import Placement, Slot, cut, whole
from rlmegatron.weight_sync.engine_rank import EngineRank


def placements(arch: Architecture, *, tp: int, rank: int, on_cpu: bool) -> Iterator[Placement]:
    """Every tensor of the checkpoint as rank `rank` of the engine holds it; what is padding there has no placement."""
    here = EngineRank(tp, rank, on_cpu)
    for rule in arch.parameter_rules(1):
        if not rule.copy:
            for part in rule.parts:
                yield from _of_tensor(part, arch, here)


def _of_tensor(part: Part, arch: Architecture, here: EngineRank) -> Iterator[Placement]:
    if part.name in (EMBEDDING, HEAD):
        share = here.vocabulary(arch.vocab_size)
        yield from cut(part, 0, share, Slot(part.name))
        if arch.tied_embeddings and has_own_head(arch):
            yield from cut(part, 0, share, Slot(HEAD))
    elif ".self_attn." in part.name:
        yield from attention_placements(part, arch, here)
    elif part.name.endswith("norm.weight"):
        yield whole(part)
    else:
        yield from mlp_placements(part, arch, here)
