"""SGLang's own arguments in `rollout.engine_args`: those that the run decides, or that move weights, are refused."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.config import rules
from rlmegatron.config.load import load

MakeConfig = Callable[..., Path]


def found(path: Path, *overrides: str) -> list[str]:
    return rules.problems(load(path, overrides), world_size=None, card=None)


def test_a_server_argument_that_the_run_decides_is_refused_with_its_key(make_config: MakeConfig) -> None:
    assert found(make_config(), "rollout.engine_args={tp_size: 3, ep_size: 3, log_level: info}") == [
        "rollout.engine_args.ep_size: cannot be set here; use rollout.expert",
        "rollout.engine_args.tp_size: cannot be set here; use rollout.tensor",
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("moe_a2a_backend: deepep", "moe_a2a_backend: 'deepep' {}; use 'none'"),
        ("moe_runner_backend: flashinfer_trtllm", "moe_runner_backend: 'flashinfer_trtllm' {}; use 'auto' or 'triton'"),
        ("enable_dp_attention: true, dp_size: 2", "dp_size: 2 {}; use 1|enable_dp_attention: true {}; use false"),
        ("ep_num_redundant_experts: 2", "ep_num_redundant_experts: 2 {}; use 0"),
        ("moe_dense_tp_size: 1", "moe_dense_tp_size: 1 {}; remove it"),
        ("quantization: fp8", "quantization: 'fp8' {}; remove it"),
        ("cpu_offload_gb: 4", "cpu_offload_gb: 4 {}; use 0"),
        ("pp_size: 2", "pp_size: 2 {}; use 1"),
        ("model_impl: transformers", "model_impl: 'transformers' {}; use 'auto' or 'sglang'"),
        ("enable_lora: true", "enable_lora: true {}; use false"),
        ("speculative_algorithm: EAGLE", "speculative_algorithm: 'EAGLE' {}; remove it"),
    ],
)
def test_a_server_argument_that_moves_weights_is_refused(make_config: MakeConfig, given: str, expected: str) -> None:
    what = "has engines keep weights where publishing does not put them"
    assert found(make_config(), f"rollout.engine_args={{{given}}}") == [
        f"rollout.engine_args.{line.format(what)}" for line in expected.split("|")
    ]


def test_a_server_argument_that_leaves_weights_where_they_are_is_taken(make_config: MakeConfig) -> None:
    harmless = (
        "moe_a2a_backend: none, moe_runner_backend: triton, dp_size: 1, enable_dp_attention: false, "
        "model_impl: sglang, cpu_offload_gb: 0, disable_shared_experts_fusion: false"
    )
    assert found(make_config(), f"rollout.engine_args={{{harmless}}}") == []


def test_shared_experts_are_not_fused_where_experts_are_spread(make_config: MakeConfig) -> None:
    overrides = ("rollout={tensor: 2, expert: 2}", "rollout.engine_args={disable_shared_experts_fusion: false}")
    assert found(make_config(), *overrides) == [
        "rollout.engine_args.disable_shared_experts_fusion: false cannot go with rollout.expert 2: some GPUs would "
        "copy shared experts to every part; remove it"
    ]


def test_sglang_has_every_server_argument_that_is_refused() -> None:
    """Read as text, because importing SGLang takes long."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("needs sglang")
    folder = Path(next(iter(package.submodule_search_locations)), "srt", "arg_groups", "fields")
    known = re.findall(r"^    (\w+): A\[", "\n".join(path.read_text() for path in folder.glob("*.py")), re.MULTILINE)
    refused = {*rules._OWN_ENGINE_ARGS, *rules._AS_PUBLISHED, "disable_shared_experts_fusion"}
    assert refused - set(known) == set()
