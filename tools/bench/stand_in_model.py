"""The parameters of one rank of an SGLang engine, by SGLang's names and shapes, without SGLang and without a forward.

In: an architecture and a rank. Out: a module to load Hugging Face tensors into as SGLang's own model does it, or to be
written into by whatever moves weights. It knows its parameters from `weight_sync.engine_layout`, which is checked
against SGLang itself elsewhere. Must never import sglang or megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from bench.named_modules import hang_up, owner_of
from torch import Tensor, nn

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.rules import Box
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.engine_parameters import least_shapes
from rlmegatron.weight_sync.engine_placement import Home, Placement

GARBAGE = 0xA5
"""Every byte of what nobody has written yet."""
_TRANSPOSED = ".mT"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What decides a rank's parameters; `on_cpu` is whether they are padded as SGLang pads them there."""

    arch: Architecture
    tensor: int
    rank: int
    dtype: torch.dtype
    on_cpu: bool = False
    device: str = "cpu"
    expert: int = 1

    def placements(self) -> list[Placement]:
        """Where every tensor of a checkpoint goes."""
        return list(placements(self.arch, tp=self.tensor, ep=self.expert, rank=self.rank, on_cpu=self.on_cpu))

    def fp32_tensors(self) -> set[str]:
        """The tensors that keep fp32 whatever type the model has."""
        return {part.name for rule in self.arch.parameter_rules(1) if rule.keeps_fp32 for part in rule.parts}


class StandInModel(nn.Module):
    """Has a parameter, filled with garbage, for the first home of every placement, just large enough.

    What SGLang derives from its parameters (`w_kc`, `w_vc`) is an attribute, as there.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self._homes: dict[str, list[Placement]] = defaultdict(list)
        self._copies: list[tuple[Placement, Placement]] = []
        every = spec.placements()
        for placement in every:
            if not placement.is_derived:
                self._homes[placement.name].append(placement)
        hang_up(self, _empty(spec, [one for one in every if not one.is_derived]))
        for path, tensor in _empty(spec, [one for one in every if one.is_derived]).items():
            owner, name = owner_of(self, path.removesuffix(_TRANSPOSED))
            setattr(owner, name, tensor.mT if path.endswith(_TRANSPOSED) else tensor)
        self._copies = [(one, self._origin(one)) for one in every if one.is_derived]
        self.spoil()

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Place whole Hugging Face tensors; a name that this rank has no place for is passed over, as SGLang does."""
        names = set()
        for name, tensor in named_tensors:
            names.add(name)
            for placement in self._homes.get(name, ()):
                home = placement.homes[0]
                self._tensor(home)[slices(home.box)].copy_(tensor[slices(placement.source)])
        self.post_load_weights(weight_names=names)

    @torch.no_grad()
    def post_load_weights(self, is_nextn: bool = False, weight_names: Iterable[str] | None = None) -> None:
        """Derive what SGLang derives, from all parameters or from those that hold `weight_names`."""
        assert not is_nextn, "the stand-in has no layers that predict further tokens"
        wanted = None if weight_names is None else set(weight_names)
        for copy, origin in self._copies:
            if wanted is None or copy.name in wanted:
                home, source = copy.homes[0], origin.homes[0]
                box = _inside(copy.source, origin.source, source.box)
                self._tensor(home)[slices(home.box)].copy_(self._tensor(source)[slices(box)])

    @torch.no_grad()
    def spoil(self) -> None:
        """Fill everything with garbage, so that what a transfer leaves out shows."""
        derived = [self._tensor(copy.homes[0]) for copy, _ in self._copies]
        for tensor in (*self.parameters(), *derived):
            _bytes_of(tensor).fill_(GARBAGE)

    def held(self, path: str) -> Tensor:
        """A parameter, or something derived, by its path of attributes."""
        return self._tensor(Home(path, (), ()))

    def _tensor(self, home: Home) -> Tensor:
        owner, name = owner_of(self, home.parameter.removesuffix(_TRANSPOSED))
        found = getattr(owner, name)
        assert isinstance(found, Tensor), f"{home.parameter} is no tensor"
        return found.mT if home.parameter.endswith(_TRANSPOSED) else found

    def _origin(self, copy: Placement) -> Placement:
        for one in self._homes[copy.name]:
            spans = zip(copy.source, one.source, strict=True)
            if all(low >= first and high <= last for (low, high), (first, last) in spans):
                return one
        raise AssertionError(f"{copy.name}: nothing holds {copy.source}, from which {copy.homes[0].parameter} derives")


def _empty(spec: ModelSpec, every: Sequence[Placement]) -> dict[str, Tensor]:
    """One tensor for each parameter."""
    in_fp32 = spec.fp32_tensors()
    dtypes = {one.homes[0].parameter: torch.float32 if one.name in in_fp32 else spec.dtype for one in every}
    shapes = least_shapes(every)
    return {path: torch.empty(shape, dtype=dtypes[path], device=spec.device) for path, shape in shapes.items()}


def _inside(part: Box, whole: Box, home: Box) -> Box:
    """Where the elements of `part`, a part of `whole`, lie in a parameter that keeps `whole` at `home`."""
    lead = home[: len(home) - len(whole)]
    moved = zip(part, whole, home[len(lead) :], strict=True)
    return (*lead, *((start + low - first, start + high - first) for (low, high), (first, _), (start, _) in moved))


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach()
    return (flat if flat.is_contiguous() else flat.mT).view(-1).view(torch.uint8)
