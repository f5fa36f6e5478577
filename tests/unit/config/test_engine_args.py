"""SGLang's own arguments in `rollout.engine_args`: those that the run decides, or that move weights, are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.config import engine_args, rules
from rlmegatron.config.load import load
from rlmegatron.config.schema import RolloutConfig
from rlmegatron.config.server_arguments import server_argument_names
from rlmegatron.platform.sglang_cpu import EngineFindings, engine_support
from rlmegatron.rollout.sglang_engine import EngineSpec, _server_args

MakeConfig = Callable[..., Path]


def found(path: Path, *overrides: str) -> list[str]:
    return rules.problems(load(path, overrides), world_size=None, card=None)


def test_a_server_argument_that_the_run_decides_is_refused_with_its_key(make_config: MakeConfig) -> None:
    assert found(make_config(), "rollout.engine_args={tp_size: 3, ep_size: 3, log_level: info}") == [
        "rollout.engine_args.ep_size: cannot be set here; use rollout.expert",
        "rollout.engine_args.tp_size: cannot be set here; use rollout.tensor",
    ]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("enable_return_routed_experts: true", "moe.router_replay decides it"),
        ("sampling_backend: flashinfer", "only 'pytorch' draws each answer by its own seed, and every engine has it"),
        ("mem_fraction_static: 0.5", "use rollout.mem_fraction"),
        ("max_running_requests: 8", "use rollout.max_running_requests"),
        ("max_total_tokens: 8", "use rollout.max_total_tokens"),
        ("enable_memory_saver: false", "the learner gets an engine's memory by it"),
        ("nccl_port: 1", "it is chosen when the engine starts"),
        ("nnodes: 2", "an engine lies on one node"),
    ],
)
def test_a_server_argument_that_a_run_depends_on_is_refused(make_config: MakeConfig, given: str, why: str) -> None:
    name = given.partition(":")[0]
    assert found(make_config(), f"rollout.engine_args={{{given}}}") == [
        f"rollout.engine_args.{name}: cannot be set here; {why}"
    ]


def test_every_server_argument_that_engines_set_was_looked_at(tmp_path: Path) -> None:
    """Those of ours that are neither refused nor named here could be overridden by accident."""
    spec = EngineSpec(str(tmp_path), "bf16", context_length=8, log_path=tmp_path, seed=1)
    support = engine_support(
        EngineFindings(False, False, False), cores=("0",), context_length=8, max_running_requests=1
    )
    config = RolloutConfig(expert=2, max_total_tokens=8)
    ours = _server_args(spec, config, support.server_args, on_device=False)
    free = {"enable_fp32_lm_head", "skip_server_warmup", "sleep_on_idle"}
    on_cpu = {"attention_backend", "grammar_backend", "disable_cuda_graph"}
    refused_by_a_rule = {"disable_shared_experts_fusion"}
    assert set(ours) - engine_args.OWN_ENGINE_ARGS.keys() == free | on_cpu | refused_by_a_rule


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("log_levl", "; did you mean 'log_level'?"),
        ("gpu_memory_utilization", "; here it is rollout.mem_fraction"),
        ("tp-size", "; here it is rollout.tensor"),
        ("context_len", "; for context_length: use rollout.context_length"),
        ("zzz", ""),
    ],
)
def test_a_server_argument_that_sglang_does_not_have_is_reported(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    names = frozenset({"log_level", "context_length", "tp_size", "model_path"})
    monkeypatch.setattr(engine_args, "server_argument_names", lambda: names)
    assert found(make_config(), f"rollout.engine_args={{{name}: 1, log_level: info}}") == [
        f"rollout.engine_args.{name}: the installed SGLang has no such argument{hint}"
    ]
    monkeypatch.setattr(engine_args, "server_argument_names", frozenset)
    assert found(make_config(), f"rollout.engine_args={{{name}: 1}}") == [], "not known without SGLang"


@pytest.mark.parametrize("file", ["server_args.py", "arg_groups/fields/model.py"])
def test_the_names_are_read_without_importing_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    source = tmp_path / "sglang" / "srt" / file
    source.parent.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    source.write_text("class Model:\n    model_path: A[str, 'x'] = ''\n    _own: int = 0\n    LIMIT = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    server_argument_names.cache_clear()
    try:
        assert server_argument_names() == {"model_path"}
        source.write_text("class Other:\n    something: int\n")
        server_argument_names.cache_clear()
        assert server_argument_names() == set(), "kept somewhere else"
    finally:
        server_argument_names.cache_clear()


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
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang")
    refused = {*engine_args.OWN_ENGINE_ARGS, *engine_args.AS_PUBLISHED, "disable_shared_experts_fusion"}
    assert refused - server_argument_names() == set()
