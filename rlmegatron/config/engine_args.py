"""Which of SGLang's own server arguments `rollout.engine_args` may set.

In: the config, and the names that the installed SGLang has. Out: one line per argument that may not be given, or not
with its value. Must never import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlmegatron.config.other_libraries import key_elsewhere
from rlmegatron.config.schema import RunConfig
from rlmegatron.config.server_arguments import server_argument_names
from rlmegatron.config.wording import as_yaml, listed, nearest

_ALIKE = 0.75
_ON_ONE_NODE = "an engine lies on one node"
OWN_ENGINE_ARGS: Mapping[str, str] = {
    "tp_size": "use rollout.tensor",
    "ep_size": "use rollout.expert",
    "model_path": "use model.path",
    "dtype": "use rollout.dtype",
    "context_length": "use rollout.context_length",
    "max_running_requests": "use rollout.max_running_requests",
    "max_total_tokens": "use rollout.max_total_tokens",
    "mem_fraction_static": "use rollout.mem_fraction",
    "random_seed": "use seed",
    "enable_return_routed_experts": "moe.router_replay decides it",
    "sampling_backend": "only 'pytorch' draws each answer by its own seed, and every engine has it",
    "preferred_sampling_params": "answers are drawn as rollout.temperature, top_p and top_k say",
    "json_model_override_args": "engines serve the model that is trained; change its config.json",
    "device": "the machine decides it",
    "enable_memory_saver": "the learner gets an engine's memory by it",
    "base_gpu_id": "the placement of engines decides it",
    "gpu_id_step": "the placement of engines decides it",
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), _ON_ONE_NODE),
    "host": "engines listen on loopback only",
    "port": "it is chosen when the engine starts",
    "nccl_port": "it is chosen when the engine starts",
    "api_key": "it is made when the engine starts",
    "admin_api_key": "the one key of an engine is made when it starts",
    "custom_weight_loader": "publishing weights depends on it",
    "weight_version": "publishing weights sets it",
    "skip_tokenizer_init": "engines take and give token ids",
    "load_format": "engines get their weights by publishing",
}
"""What a run decides elsewhere, or depends on: the server argument and why. What else an engine sets may be overridden:
enable_fp32_lm_head, skip_server_warmup, sleep_on_idle, and what suits a CPU (attention_backend, grammar_backend,
disable_cuda_graph)."""
_NOTHING: tuple[str | int | bool, ...] = ()
AS_PUBLISHED: Mapping[str, tuple[str | int | bool, ...]] = {
    **dict.fromkeys(("pp_size", "dp_size", "attn_cp_size", "moe_dp_size", "dwdp_size", "dcp_size"), (1,)),
    **dict.fromkeys(("enable_dp_attention", "enable_dp_lm_head", "enable_prefill_cp"), (False,)),
    **dict.fromkeys(("enable_eplb", "enable_waterfill", "enforce_shared_experts_fusion"), (False,)),
    **dict.fromkeys(("enable_lora", "quantize_and_serve"), (False,)),
    **dict.fromkeys(("quantization", "modelopt_quant", "rl_quant_profile", "kt_weight_path"), _NOTHING),
    **dict.fromkeys(("moe_dense_tp_size", "elastic_ep_backend", "elastic_ep_initial_size"), _NOTHING),
    **dict.fromkeys(("lora_paths", "speculative_algorithm"), _NOTHING),
    "moe_a2a_backend": ("none",),
    "moe_runner_backend": ("auto", "triton"),
    "ep_num_redundant_experts": (0,),
    "init_expert_location": ("trivial",),
    "cpu_offload_gb": (0,),
    "offload_group_size": (-1, 0),
    "weight_cache_mode": ("off",),
    "model_impl": ("auto", "sglang"),
}
"""Server arguments (of sglang 0.5.21) that move, repack, copy or rename weights, and the values with which an engine
keeps them where `weight_sync/engine_layout.py` says."""


def engine_arg_problems(cfg: RunConfig) -> Iterator[str]:
    """Of arguments that a run decides, that move weights, or that the installed SGLang does not have."""
    given = cfg.rollout.engine_args
    if given:
        yield from _unknown(given)
    for name in sorted(given.keys() & OWN_ENGINE_ARGS.keys()):
        yield f"rollout.engine_args.{name}: cannot be set here; {OWN_ENGINE_ARGS[name]}"
    for name in sorted(given.keys() & AS_PUBLISHED.keys()):
        allowed = AS_PUBLISHED[name]
        if given[name] not in allowed:
            remedy = f"use {listed([as_yaml(value) for value in allowed])}" if allowed else "remove it"
            yield (
                f"rollout.engine_args.{name}: {as_yaml(given[name])} has engines keep weights where publishing does "
                f"not put them; {remedy}"
            )
    if cfg.rollout.expert > 1 and given.get("disable_shared_experts_fusion") is False:
        yield (
            "rollout.engine_args.disable_shared_experts_fusion: false cannot go with rollout.expert "
            f"{cfg.rollout.expert}: some GPUs would copy shared experts to every part; remove it"
        )


def _unknown(given: Mapping[str, object]) -> Iterator[str]:
    names = server_argument_names()
    if not names:
        return
    for name in sorted(given.keys() - names - OWN_ENGINE_ARGS.keys() - AS_PUBLISHED.keys()):
        hint = key_elsewhere(name, sections=["rollout"])
        if hint is None and (close := nearest(name, names, cutoff=_ALIKE)):
            hint = f"for {close}: {OWN_ENGINE_ARGS[close]}" if close in OWN_ENGINE_ARGS else f"did you mean '{close}'?"
        yield f"rollout.engine_args.{name}: the installed SGLang has no such argument{f'; {hint}' if hint else ''}"
