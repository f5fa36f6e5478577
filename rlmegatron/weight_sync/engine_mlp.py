"""Where SGLang keeps the tensors of an MLP: gate above up in one parameter, all experts of a layer in another.

In: one tensor, the architecture and an engine's rank. Out: its `Placement`s, none for an expert that lies on other
ranks. Pure; must never import torch or sglang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.rules import Part
from rlmegatron.weight_sync.engine_placement import Placement, Slot, cut, whole
from rlmegatron.weight_sync.engine_rank import EngineRank, Share

_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.")
_SHARED = ".shared_experts."


def mlp_placements(part: Part, arch: Architecture, here: EngineRank) -> Iterator[Placement]:
    """One tensor of a dense MLP, of an expert, of the shared experts or of the router."""
    block, module, _ = part.name.rsplit(".", 2)
    expert, experts = _EXPERT.match(part.name), arch.experts
    if module == "gate":
        yield whole(part)
        return
    assert module in (*_GATE, *_UP, *_DOWN), f"nobody knows where SGLang keeps {part.name}"
    if expert:
        assert experts is not None, f"{part.name} is the tensor of an expert"
        number, held = int(expert[2]), here.experts(experts.num)
        if number in held:
            share = here.expert_ffn(experts.ffn)
            count = None if _may_be_appended(arch, here) else len(held)
            yield from _matrix(part, module, share, _stacked(expert[1], number - held.start, count, module, share))
    elif _SHARED in part.name:
        assert experts is not None, f"{part.name} is the tensor of a shared expert"
        count = experts.shared_ffn // experts.ffn
        share = here.ffn(experts.shared_ffn, experts=count)
        slots = [_slot(block, module, share)]
        if _may_be_appended(arch, here):
            slots.append(_stacked(block.replace(_SHARED.rstrip("."), ".experts"), experts.num, None, module, share))
        yield from _matrix(part, module, share, *slots)
    else:
        share = here.ffn(arch.ffn_size)
        yield from _matrix(part, module, share, _slot(block, module, share))


def _matrix(part: Part, module: str, share: Share, *slots: Slot) -> Iterator[Placement]:
    yield from cut(part, 1 if module in _DOWN else 0, share, *slots)


def _may_be_appended(arch: Architecture, here: EngineRank) -> bool:
    """On a GPU SGLang may keep a single shared expert behind the others, where they lie in one place."""
    experts = arch.experts
    return experts is not None and experts.shared_ffn == experts.ffn and here.ep == 1


def _slot(block: str, module: str, share: Share) -> Slot:
    if module in _DOWN:
        return Slot(f"{block}.down_proj.weight")
    return Slot(f"{block}.gate_up_proj.weight", share.room if module in _UP else 0, 2 * share.room)


def _stacked(experts: str, number: int, count: int | None, module: str, share: Share) -> Slot:
    lead = ((number, number + 1),)
    if module in _DOWN:
        return Slot(f"{experts}.w2_weight", lead=lead, lead_sizes=(count,))
    offset = share.room if module in _UP else 0
    return Slot(f"{experts}.w13_weight", offset, 2 * share.room, lead, (count,))
