"""SGLang's own model classes in a process of their own, built for one rank of an engine and loaded by its own loader.

In: two paths; the first holds a list of `Job`s. Out: at the second, what every job's model holds afterwards. Runs where
there is no CUDA device, with SGLang's stand-ins on PYTHONPATH. Must never use `weight_sync.engine_layout`, which is
checked against it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlmegatron.platform.sglang_cpu import EngineFindings, engine_support
from rlmegatron.weight_sync.engine_worker import ORDER, report_digests

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 560.0  # below the time that pytest gives a test, after which nobody would end the process
MODULES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v2",
}
LOADERS = ("linear", "vocab_parallel_embedding", "moe.fused_moe_triton.layer")
DERIVED = ("w_kc", "w_vc.mT")


@dataclass
class EngineRank:
    """What to build: the model in `directory`, which has a config.json, as rank `rank` of an engine has it.

    Without `on_cpu` the loaders take the way that they take on a GPU. `fuses` makes room for the shared expert among
    the others, as SGLang does on some GPUs.
    """

    name: str
    directory: str
    tp: int
    rank: int
    on_cpu: bool
    dtype: str
    fuses: bool = field(default=False, kw_only=True)
    ep: int = field(default=1, kw_only=True)


@dataclass
class Job(EngineRank):
    """`calls` are the lists of tensors that `load_weights` gets, one after another; `order` is for `report_digests`."""

    calls: list[list[tuple[str, Tensor]]]
    order: Tensor


@functools.cache
def server_args_of(directory: str, tp: int, ep: int, dtype: str, fuses: bool) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=directory,
        device="cpu",
        dtype=dtype,
        tp_size=tp,
        ep_size=ep,
        attention_backend="torch_native",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        disable_shared_experts_fusion=not fuses,
    )


def build(part: EngineRank) -> Any:
    """The model as SGLang's loader builds it, but for its parameters, which are NaN."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    runtime_context.reset_context()
    server_args = server_args_of(part.directory, part.tp, part.ep, part.dtype, part.fuses)
    runtime_context.publish(server_args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=part.rank))
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)
    group = SimpleNamespace(world_size=part.tp, rank_in_group=part.rank, cpu_group=None)  # nobody communicates here
    runtime_context.get_parallel().override_permanently(pp_group=alone, tp_group=group)
    initialize_moe_config()
    for module in LOADERS:
        importlib.import_module(f"sglang.srt.layers.{module}")._is_cpu = part.on_cpu  # type: ignore[attr-defined]
    config = ModelConfig.from_server_args(server_args)
    if part.on_cpu:
        config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), part.tp)
    model = getattr(importlib.import_module(f"sglang.srt.models.{MODULES[part.name]}"), part.name)
    with set_default_torch_dtype(config.dtype):
        built = model(config=config.hf_config, quant_config=None)
    for parameter in built.parameters():
        parameter.data.fill_(float("nan"))
    return built


def run(job: Job) -> dict[str, Tensor]:
    """Every parameter after all calls, and the tensors that the loader derives from one."""
    model = build(job)
    for call in job.calls:
        model.load_weights(iter(call))
    report_digests(model, [(ORDER, job.order)])
    return snapshot(model)


def snapshot(model: Any) -> dict[str, Tensor]:
    """Copies of every parameter, and of the tensors that the loader derives from one."""
    found = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if getattr(module, "w_kc", None) is not None:
            found |= {f"{path}.{name}": read(module, name).clone() for name in DERIVED}
    return found


def read(module: Any, path: str) -> Tensor:
    for name in path.split("."):
        module = getattr(module, name)
    assert isinstance(module, Tensor)
    return module


def run_beside_sglang(program: Path, *paths: Path) -> None:
    """Run a program of this folder on `paths`, in a process that can import SGLang on a CPU; it must end in time."""
    support = engine_support(
        EngineFindings(cuda=False, sgl_kernel=False, torchvision=True),
        cores=["0"],
        context_length=64,
        max_running_requests=1,
    )
    search = [str(ROOT), str(ROOT / "tools"), *support.python_path]
    environment = {**os.environ, **support.environment, "PYTHONPATH": os.pathsep.join(search)}
    command = [sys.executable, str(program), *map(str, paths)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-5000:]


def leave_out_other_models() -> None:
    """SGLang imports all of its models at once, which takes as long as everything else."""
    folder = Path(next(iter(importlib.util.find_spec("sglang.srt.models").submodule_search_locations)))
    others = {path.stem for path in folder.glob("*.py")} - set(MODULES.values())
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(others))


if __name__ == "__main__":
    leave_out_other_models()
    torch.save([run(job) for job in torch.load(sys.argv[1], weights_only=False)], sys.argv[2])
