"""Stands in for Transformer Engine where there is no GPU: the parameters of its modules, by name and shape, no kernels.

In: nothing. Out: megatron-core and the learner, imported afresh, take it for the real one. Names are those of
`transformer_engine/pytorch/module/*.py`, release 2.6. Must only run in a process that ends soon: it replaces modules.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

VERSION = "2.6.0"  # from 2.7 on, Megatron asks for more of it at import


class _Engine(nn.Module):
    """Every module of it has an extra state, which is empty without FP8."""

    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


def _mark(tensor: Any, dim: int) -> None:
    """As the engine does, for weights that it takes for whole, too."""
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = True, dim, 1


def _local(in_features: int, out_features: int, parallel_mode: str | None, tp_size: int) -> tuple[int, int]:
    """(out, in) of this rank's weight; `parallel_mode` None is a whole one."""
    assert parallel_mode in (None, "column", "row")
    cut_out, cut_in = (tp_size if parallel_mode == mode else 1 for mode in ("column", "row"))
    assert out_features % cut_out == 0 and in_features % cut_in == 0
    return out_features // cut_out, in_features // cut_in


class Linear(_Engine):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parallel_mode: str | None,
        tp_size: int,
        params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        super().__init__()
        shape = _local(in_features, out_features, parallel_mode, tp_size)
        self.parallel_mode, self.tp_size, self.use_bias = parallel_mode, tp_size, bias
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=params_dtype)) if bias else torch.empty(0)
        _mark(self.weight, 1 if parallel_mode == "row" else 0)
        if bias and parallel_mode == "column":
            _mark(self.bias, 0)


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, *, normalization: str, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, **kwargs)
        assert normalization == "RMSNorm"
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features, dtype=self.weight.dtype))
        self.layer_norm_bias = None


class GroupedLinear(_Engine):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parallel_mode: str | None,
        tp_size: int,
        params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias = num_gemms, bias
        shape = _local(in_features, out_features, parallel_mode, tp_size)
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype))
            _mark(weight, 1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{number}", weight)


class RMSNorm(nn.Module):
    def __init__(self, *, hidden_size: int, params_dtype: torch.dtype = torch.float32, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=params_dtype))


class DotProductAttention(_Engine):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def install_transformer_engine() -> None:
    """Import `rlmegatron.learner` only afterwards, in a function."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("megatron", "transformer_engine") or name.startswith("rlmegatron.learner"):
            del sys.modules[name]
    absent = type("Absent", (), {})
    pytorch = _module(
        "pytorch",
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        GroupedLinear=GroupedLinear,
        RMSNorm=RMSNorm,
        DotProductAttention=DotProductAttention,
        ops=ModuleType("ops"),
        fp8=_module("pytorch.fp8", FP8GlobalStateManager=absent, fp8_autocast=None),
        tensor=_module("pytorch.tensor", QuantizedTensor=absent),
        attention=_module("pytorch.attention", rope=_module("pytorch.attention.rope", apply_rotary_pos_emb=None)),
        distributed=_module(
            "pytorch.distributed",
            CudaRNGStatesTracker=absent,
            activation_recompute_forward=None,
            is_fp8_activation_recompute_enabled=None,
        ),
    )
    pytorch.ops.Sequential = pytorch.ops.FusibleOperation = absent
    common = _module("common", recipe=_module("common.recipe", DelayedScaling=absent))
    _module("", pytorch=pytorch, common=common, __version__=VERSION)

    import rlmegatron.learner.build as build

    build.has_transformer_engine = lambda: True


def _module(name: str, **content: Any) -> Any:
    """A package of the engine; submodules that are not given cannot be imported."""
    path = f"transformer_engine.{name}".rstrip(".")
    module = ModuleType(path)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
    module.__dict__.update(content)
    sys.modules[path] = module
    return module
