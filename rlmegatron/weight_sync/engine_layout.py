"""Where SGLang keeps each Hugging Face tensor of a decoder, under tensor and expert parallelism.

In: an architecture and the engine's (TP size, EP size, rank). Out: boxes, as in `models/rules.py`. Pure; must never
import torch or sglang. Checked against SGLang's own classes by a test, and by digest after every publish.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.decoder_rules import EMBEDDING, HEAD
from rlmegatron.models.rules import Part, Rule
from rlmegatron.weight_sync.engine_attention import attention_placements
from rlmegatron.weight_sync.engine_loader import has_own_head
from rlmegatron.weight_sync.engine_mlp import mlp_placements
from rlmegatron.weight_sync.engine_placement import Placement, Slot, cut, whole, within
from rlmegatron.weight_sync.engine_rank import EngineRank


def placements(arch: Architecture, *, tp: int, rank: int, on_cpu: bool, ep: int = 1) -> Iterator[Placement]:
    """Every tensor of the checkpoint as rank `rank` of the engine holds it; what is padding there has no placement.

    tp: ranks of the engine. ep: parts of them over which experts are spread, each of which tp / ep ranks share.
    """
    here = EngineRank(tp, rank, on_cpu, ep)
    # DeepSeek-V3 has 45 000 tensors, but two kinds of layers, and layers of a kind differ in their names alone. Rules
    # are taken one by one because so many objects that live on would keep the garbage collector busy.
    known: dict[tuple[object, ...], list[Placement]] = {}
    for rule in arch.rules(arch, arch.padded_vocab(1)):
        if rule.copy:
            continue
        layer = "" if rule.layer is None else f"model.layers.{rule.layer}."
        kind = (rule.path, rule.expert, *[part.shape for part in rule.parts])
        if kind not in known:
            known[kind] = list(_of_rule(rule, layer, arch, here))
        for placement in known[kind]:
            yield within(layer, placement)


def _of_rule(rule: Rule, layer: str, arch: Architecture, here: EngineRank) -> Iterator[Placement]:
    """Names begin below the layer, of tensors as of parameters."""
    for part in rule.parts:
        assert part.name.startswith(layer), f"{part.name} does not belong to {layer}"
        yield from _of_tensor(Part(part.name[len(layer) :], part.shape), arch, here)


def _of_tensor(part: Part, arch: Architecture, here: EngineRank) -> Iterator[Placement]:
    if part.name in (EMBEDDING, HEAD):
        share = here.vocabulary(arch.vocab_size)
        yield from cut(part, 0, share, Slot(part.name))
        if arch.tied_embeddings and has_own_head(arch):
            yield from cut(part, 0, share, Slot(HEAD))
    elif part.name.startswith("self_attn."):
        yield from attention_placements(part, arch, here)
    elif part.name.endswith("norm.weight"):
        yield whole(part)
    else:
        yield from mlp_placements(part, arch, here)
