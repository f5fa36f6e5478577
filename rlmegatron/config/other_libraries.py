"""What other libraries, and papers, call the keys and algorithms that have another name here.

In: a name or key that a config does not have. Out: what it is here, in words. Pure; must never import any module of
ours but `wording.py`. docs/migration.md says more of the differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlmegatron.config.wording import listed, plain

_LOSS_OF: Mapping[str, str] = {
    **dict.fromkeys(("grpo", "opo", "reinforce_pp", "reinforce_pp_baseline", "gae"), "ppo_clip"),
    **dict.fromkeys(("gpg", "rloo", "remax"), "reinforce"),
}
"""The policy loss that goes with each advantage in its paper or in yaml_configs/."""
_ADVANTAGE_OF: Mapping[str, str] = {"gspo": "grpo", "cispo": "grpo", "ppo_clip": "gae"}
ADVANTAGES = ("gae", "gpg", "grpo", "opo", "reinforce_pp", "reinforce_pp_baseline", "remax", "rloo")
LOSSES = ("cispo", "gspo", "ppo_clip", "reinforce")
"""What there is instead of an algorithm that is not here."""


def _not_here(ours: Sequence[str]) -> str:
    return f"there is none like it here; use {listed(ours)}, or 'package.module:function'"


def _is_advantage(name: str) -> str:
    return f"'{name}' is an algorithm.advantage; its loss is '{_LOSS_OF[name]}'"


_NAMES: Mapping[str, Mapping[str, str]] = {
    "algorithm.advantage": {
        **{
            loss: f"'{loss}' is an algorithm.policy_loss; its advantage is '{advantage}'"
            for loss, advantage in _ADVANTAGE_OF.items()
        },
        "ppo": "PPO's is 'gae'",
        "dapo": "DAPO's is 'grpo'; what makes it DAPO is in yaml_configs/quickstart_dapo.yaml",
        "dr_grpo": "Dr. GRPO's is 'grpo' with normalize_std: false (yaml_configs/quickstart_dr_grpo.yaml)",
        "group_norm": "OpenRLHF's 'group_norm' is 'grpo'",
        "grpo_vectorized": "use 'grpo'",
        "rloo_vectorized": "use 'rloo'",
        "reinforce": "OpenRLHF's 'reinforce' is 'reinforce_pp'; without a baseline, 'reinforce' is a policy_loss here",
        "reinforce_baseline": "use 'reinforce_pp_baseline'",
        "reinforce_plus_plus": "use 'reinforce_pp'",
        "reinforce_plus_plus_baseline": "use 'reinforce_pp_baseline'",
        **dict.fromkeys(
            ("gdpo", "grpo_passk", "optimal_token_baseline", "tir_optimal_token_baseline", "vtrace"),
            _not_here(ADVANTAGES),
        ),
    },
    "algorithm.policy_loss": {
        **{name: _is_advantage(name) for name in _LOSS_OF},
        "ppo": "use 'ppo_clip'",
        "vanilla": "verl's 'vanilla' is 'ppo_clip'",
        "dapo": "DAPO's is 'ppo_clip'; what makes it DAPO is in yaml_configs/quickstart_dapo.yaml",
        "dr_grpo": "Dr. GRPO's is 'ppo_clip'; what makes it Dr. GRPO is in yaml_configs/quickstart_dr_grpo.yaml",
        "bnpo": "TRL's 'bnpo' is 'ppo_clip' with algorithm.aggregation: token_mean",
        "reinforce_plus_plus": _is_advantage("reinforce_pp"),
        "reinforce_plus_plus_baseline": _is_advantage("reinforce_pp_baseline"),
        **dict.fromkeys(
            ("sapo", "luspo", "gmpo", "geo_mean", "clip_cov", "kl_cov", "dppo_kl", "dppo_tv"),
            _not_here(LOSSES),
        ),
    },
}
"""By key: names of other libraries, and of algorithms that are a combination here, where the nearest spelling
misleads."""

_KEYS: Mapping[str, str] = {
    "name": "experiment_name run_name",
    "algorithm": "algo",
    "run_dir": "output_dir default_local_dir save_path",
    "model.path": "model_name_or_path pretrain",
    "model.dtype": "bf16 torch_dtype param_dtype",
    "model.recompute": "gradient_checkpointing enable_gradient_checkpointing recompute_granularity",
    "parallel.tensor": "tensor_model_parallel_size tensor_parallel_size tp_size tp",
    "parallel.pipeline": "pipeline_model_parallel_size pipeline_parallel_size pp_size pp",
    "parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "parallel.expert": "expert_model_parallel_size expert_parallel_size ep_size ep",
    "parallel.expert_tensor": "expert_tensor_parallel_size etp_size etp",
    "parallel.sequence": "sequence_parallel",
    "parallel.distributed_optimizer": "use_distributed_optimizer",
    "actor.optimizer": "optim",
    "actor.optimizer.lr": "learning_rate actor_learning_rate",
    "actor.optimizer.min_lr": "min_lr_ratio",
    "actor.optimizer.warmup_steps": "lr_warmup_steps lr_warmup_ratio warmup_ratio lr_warmup_steps_ratio",
    "actor.optimizer.schedule": "lr_scheduler lr_scheduler_type lr_decay_style warmup_style",
    "actor.optimizer.clip_grad": "grad_clip max_grad_norm max_norm",
    "actor.optimizer.betas": "adam_betas adam_beta1 adam_beta2",
    "critic.optimizer": "optim",
    "critic.optimizer.lr": "learning_rate critic_learning_rate",
    "critic.optimizer.warmup_steps": "lr_warmup_steps lr_warmup_ratio warmup_ratio lr_warmup_steps_ratio",
    "critic.optimizer.schedule": "lr_scheduler lr_scheduler_type lr_decay_style warmup_style",
    "critic.optimizer.clip_grad": "grad_clip max_grad_norm",
    "critic.path": "critic_pretrain value_model_path",
    "critic.warmup_steps": "critic_warmup freezing_actor_steps",
    "rollout.prompts_per_step": "train_batch_size rollout_batch_size generation_batch_size",
    "rollout.samples_per_prompt": "n num_generations n_samples_per_prompt group_size",
    "rollout.max_new_tokens": (
        "response_length max_response_length max_completion_length generate_max_len max_tokens max_gen_tokens"
    ),
    "rollout.stop_token_ids": "stop stop_strings",
    "rollout.tensor": (
        "tensor_model_parallel_size tensor_parallel_size tp_size tp vllm_tensor_parallel_size "
        "infer_tensor_parallel_size"
    ),
    "rollout.expert": "expert_parallel_size ep_size ep",
    "rollout.context_length": "max_model_len",
    "rollout.max_running_requests": "max_num_seqs",
    "rollout.mem_fraction": "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static",
    "rollout.dynamic_sampling": "filter_groups dynamic_filtering_reward_range",
    "rollout.dynamic_sampling.enabled": "dynamic_filtering",
    "rollout.dynamic_sampling.max_prompts_ratio": "max_num_gen_batches",
    "rollout.engine_args": "engine_kwargs vllm_kwargs sglang_kwargs",
    "data.train": "train_files train_dataset prompt_data",
    "data.prompt_key": "input_key",
    "data.chat_template": "apply_chat_template",
    "data.max_prompt_tokens": "prompt_length max_prompt_length prompt_max_len",
    "reward.name": "reward_funcs reward_fn custom_reward_function remote_rm_url",
    "reward.args": "reward_weights reward_kwargs overlong_buffer overlong_buffer_cfg overlong_penalty_factor",
    "reward.args.answer_key": "answer_key label_key",
    "reward.args.max_tokens": "max_tokens",
    "reward.args.require_stop": "require_stop",
    "reward.args.buffer_tokens": "buffer_tokens overlong_buffer_len",
    "reward.clip": "reward_clip_range",
    "algorithm.advantage": "adv_estimator advantage_estimator",
    "algorithm.normalize_std": "norm_adv_by_std_in_grpo scale_rewards",
    "algorithm.lam": "lambd gae_lambda",
    "algorithm.policy_loss": "loss_mode policy_loss_type importance_sampling_level",
    "algorithm.aggregation": "loss_agg_mode loss_type",
    "algorithm.clip_low": "clip_ratio clip_ratio_low cliprange epsilon eps_clip eps_clip_low_high",
    "algorithm.clip_high": "clip_ratio clip_ratio_high cliprange epsilon epsilon_high eps_clip eps_clip_low_high",
    "actor.optimizer.eps": "epsilon adam_epsilon",
    "critic.optimizer.eps": "epsilon adam_epsilon",
    "algorithm.dual_clip": "clip_ratio_c delta",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.value_clip": "cliprange_value",
    "algorithm.drop_cut_off": "mask_truncated_completions",
    "algorithm.importance.level": (
        "rollout_is rollout_rs vllm_importance_sampling_correction enable_vllm_is_correction rollout_correction"
    ),
    "algorithm.importance.mode": "vllm_importance_sampling_mode",
    "algorithm.importance.high": (
        "tis_imp_ratio_cap rollout_is_threshold rollout_rs_threshold vllm_importance_sampling_cap "
        "vllm_is_truncated_threshold"
    ),
    "algorithm.importance.low": "rollout_rs_threshold_lower",
    "algorithm.kl": "kl_ctrl",
    "algorithm.kl.where": "use_kl_loss use_kl_in_reward",
    "algorithm.kl.coef": "beta kl_coef kl_loss_coef init_kl_coef init_coef",
    "algorithm.kl.estimator": "kl_estimator kl_loss_type kl_penalty",
    "algorithm.kl.target": "kl_target target_kl",
    "algorithm.kl.horizon": "kl_horizon",
    "train.steps": "total_epochs num_train_epochs num_episodes total_training_steps max_steps",
    "train.epochs": "ppo_epochs num_iterations max_epochs",
    "critic.epochs": "ppo_epochs",
    "train.mini_batches": "ppo_mini_batch_size mini_batch_size steps_per_generation",
    "train.micro_batch_tokens": (
        "ppo_max_token_len_per_gpu train_max_tokens_per_gpu "
        "ppo_micro_batch_size_per_gpu micro_batch_size micro_train_batch_size "
        "per_device_train_batch_size gradient_accumulation_steps"
    ),
    "train.max_kl": "target_kl",
    "train.resume": "resume_mode resume_from_checkpoint",
    "moe.router_replay": "enable_rollout_routing_replay",
    "eval.sets": "val_files eval_dataset",
    "eval.samples": "n num_generations num_generations_eval n_samples_per_prompt eval_n_samples_per_prompt",
    "eval.greedy": "do_sample",
    "eval.temperature": "eval_temperature",
    "eval.every": "test_freq eval_steps",
    "eval.at_start": "val_before_train",
    "checkpoint.every": "save_freq save_steps",
    "checkpoint.keep": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num",
    "logging.wandb_project": "project_name use_wandb",
}
"""Ours, and what others call it; some of theirs stand for several of ours."""
_SECTIONS: Mapping[str, str] = {"valkwargs": "eval", "optim": "optimizer"}
"""What others call sections of ours that their keys lie in, as `plain` spells it."""
_ASIDE = ("eval", "optimizer")
"""Sections whose keys are meant only by a name written in them, if that name stands for keys of others, too."""
_STEPS = "theirs counts passes over the data"
_PARTS = "theirs is a number of samples or micro-batches, ours how many optimizer steps a pass takes"
_TOKENS = "theirs counts samples, ours tokens"
_WORDS = "it needs algorithm.kl.where: loss or reward"
_NOTES: Mapping[str, str] = {
    **dict.fromkeys(("total_epochs", "num_train_epochs", "num_episodes"), _STEPS),
    "max_steps": "theirs counts optimizer steps, ours rollout steps",
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size", "steps_per_generation"), _PARTS),
    **dict.fromkeys(("ppo_micro_batch_size_per_gpu", "micro_batch_size", "micro_train_batch_size"), _TOKENS),
    "per_device_train_batch_size": _TOKENS,
    "gradient_accumulation_steps": "micro-batches follow from their tokens",
    "train_batch_size": "that of OpenRLHF counts answers and decides train.mini_batches",
    "generation_batch_size": "theirs counts answers, ours prompts",
    "stop": "it takes token ids, not text",
    "stop_strings": "it takes token ids, not text",
    **dict.fromkeys(("beta", "kl_coef"), _WORDS),
    "kl_loss_coef": "it needs algorithm.kl.where: loss",
    **dict.fromkeys(("init_kl_coef", "init_coef"), "it needs algorithm.kl.where: reward"),
    **dict.fromkeys(("lr_warmup_ratio", "warmup_ratio", "lr_warmup_steps_ratio"), "theirs is a share of all steps"),
    "use_kl_loss": "true is 'loss'",
    "use_kl_in_reward": "true is 'reward'",
    "target_kl": "algorithm.kl.target adapts a weight, train.max_kl ends a step's updates early",
    "critic_warmup": "theirs counts one step more",
    "loss_type": "it sets the aggregation only",
    "scale_rewards": "true for 'group', false for 'none'",
    "importance_sampling_level": "'ppo_clip' for 'token', 'gspo' for 'sequence'",
    "do_sample": "false is greedy: true, and training always samples",
    "filter_groups": "its 'metric' is called 'by'",
    "dynamic_filtering_reward_range": "it keeps groups whose rewards differ, not those whose mean lies in a range",
    "max_num_gen_batches": "theirs counts batches",
    "remote_rm_url": "a reward is a function, which may ask a server",
    "rollout_rs": "it needs algorithm.importance.mode: mask",
    "label_key": "it is an argument of the reward",
    "reward_weights": "the reward 'combine' takes weights",
    **dict.fromkeys(
        ("overlong_buffer", "overlong_buffer_cfg", "overlong_buffer_len"), "the reward 'overlong' has them"
    ),
    "overlong_penalty_factor": "it is the weight of 'overlong' in the reward 'combine'",
    "min_lr_ratio": "theirs is a share of lr",
    "use_wandb": "it takes the project's name",
}
"""How theirs differs from ours, where the names do not say it."""
_TURNS = "rollout and training take turns here; remove it"
_ABSENT: Mapping[str, str] = {
    "rollout.name": "the engine is always SGLang; remove it",
    **dict.fromkeys(("rollout.mode", "async_train", "async_training"), _TURNS),
    **dict.fromkeys(("ray_init", "ray_kwargs"), "there is no Ray here; remove it"),
    **dict.fromkeys(("nnodes", "n_gpus_per_node"), "torchrun says how many ranks there are; remove it"),
    "cast_lm_head_to_fp32": "the output layer is always in fp32 here; remove it",
    "multi_turn": "an answer is one turn here; remove it",
    "reward_model": (
        "no reward model judges answers here: rewards are functions (reward.name); critic.path starts a critic from one"
    ),
}
"""Theirs that have nothing like them here, with the section above where that tells them apart, and what to do."""
_IN_SECTIONS: Mapping[str, str] = {
    "critic.model": "here it is critic.path",
    "kl_ctrl.type": "a target makes it adaptive: algorithm.kl.target",
    "advantage.estimator": "here it is algorithm.advantage",
}
"""Theirs that only the section above tells apart, and the answer."""
_OURS: Mapping[str, tuple[str, ...]] = {
    plain(theirs): tuple(ours for ours, names in _KEYS.items() if theirs in names.split())
    for theirs in " ".join(_KEYS.values()).split()
}
_NOTE_OF = {plain(theirs): note for theirs, note in _NOTES.items()}


def name_elsewhere(key: str, name: str) -> str | None:
    """What `name`, which the config key `key` does not take, is called here.

    >>> name_elsewhere("algorithm.advantage", "GSPO"), name_elsewhere("algorithm.advantage", "grpo2")
    ("'gspo' is an algorithm.policy_loss; its advantage is 'grpo'", None)
    """
    answers = {plain(theirs): answer for theirs, answer in _NAMES.get(key, {}).items()}
    return answers.get(plain(name))


def ours_of(key: str) -> tuple[str, ...]:
    """The keys of ours that another library's key stands for."""
    return _OURS.get(plain(key), ())


def keys_elsewhere(key: str, *, sections: Sequence[str] = ()) -> tuple[str, ...]:
    """Those keys of ours that another library's key stands for where it is written below `sections`, outermost first.

    >>> keys_elsewhere("n", sections=["rollout"]), keys_elsewhere("n", sections=["rollout", "val_kwargs"])
    (('rollout.samples_per_prompt',), ('eval.samples',))
    """
    ours, given = ours_of(key), _as_ours(sections)
    usual = [name for name in ours if all(part in given or part not in _ASIDE for part in _sections_of(name))]
    return within(sections, usual or ours)


def within(sections: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
    """Those of `keys` that lie in the innermost of `sections` in which any does, of those the ones in the next, ...

    >>> within(["actor", "optim"], ["actor.optimizer.lr", "critic.optimizer.lr"]), within(["x"], ["model.path"])
    (('actor.optimizer.lr',), ('model.path',))
    """
    chosen = tuple(keys)
    for section in reversed(_as_ours(sections)):
        chosen = tuple(name for name in chosen if section in _sections_of(name)) or chosen
    return chosen


def _as_ours(sections: Sequence[str]) -> list[str]:
    return [_SECTIONS.get(plain(section), section) for section in sections]


def _sections_of(key: str) -> list[str]:
    return key.split(".")[:-1]


def is_absent(key: str, *, sections: Sequence[str] = ()) -> bool:
    """Whether nothing here is like another library's key, or section with all that it holds, written below `sections`.

    >>> is_absent("name", sections=["rollout"]), is_absent("name", sections=["trainer"])
    (True, False)
    """
    return _by_path(key, sections, _ABSENT) is not None


def answer_by_sections(key: str, *, sections: Sequence[str] = ()) -> str | None:
    """What becomes of another library's key that has nothing like it here, or only by the sections it is written in.

    >>> answer_by_sections("name", sections=["actor_rollout_ref", "rollout"]), answer_by_sections("model")
    ('the engine is always SGLang; remove it', None)
    """
    return _by_path(key, sections, {**_IN_SECTIONS, **_ABSENT})


def _by_path(key: str, sections: Sequence[str], answers: Mapping[str, str]) -> str | None:
    path = ".".join(map(plain, (*sections, key)))
    return next((answer for theirs, answer in answers.items() if _ends_with(path, theirs)), None)


def _ends_with(path: str, theirs: str) -> bool:
    return f".{path}".endswith("." + ".".join(map(plain, theirs.split("."))))


def key_elsewhere(key: str, *, sections: Sequence[str] = ()) -> str | None:
    """What another library's key, written below `sections`, is here, in words.

    >>> key_elsewhere("total_epochs"), key_elsewhere("tp_size", sections=["rollout"]), key_elsewhere("steps")
    ('here it is train.steps; theirs counts passes over the data', 'here it is rollout.tensor', None)
    """
    if answer := answer_by_sections(key, sections=sections):
        return answer
    ours = keys_elsewhere(key, sections=sections)
    if not ours:
        return None
    note = _NOTE_OF.get(plain(key))
    return f"here it is {listed(ours)}" + (f"; {note}" if note else "")
