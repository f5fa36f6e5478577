"""Rules between sections: each broken one gives exactly its line, and a sound config gives none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.config.load import load
from rlmegatron.config.rules import problems, warnings
from rlmegatron.models.card import read_model_card

MakeConfig = Callable[..., Path]


def found(
    path: Path, *overrides: str, world_size: int | None = 4, known: dict[str, set[str]] | None = None
) -> list[str]:
    cfg = load(path, overrides)
    return problems(cfg, world_size=world_size, card=read_model_card(cfg.model.path), known=known)


def warned(path: Path, *overrides: str, world_size: int = 1) -> list[str]:
    cfg = load(path, overrides)
    return warnings(cfg, world_size=world_size, card=read_model_card(cfg.model.path))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, None])
def test_a_sound_config_has_no_problems(make_config: MakeConfig, world_size: int | None) -> None:
    assert found(make_config(), world_size=world_size) == []


def test_a_sound_ppo_config_with_every_kind_of_parallelism_has_no_problems(make_config: MakeConfig) -> None:
    overrides = (
        "parallel={tensor: 2, pipeline: 2, virtual_pipeline: 2, sequence: true}",
        "rollout.tensor=4",
        "rollout.samples_per_prompt=1",
        "algorithm.advantage=gae",
        "critic={warmup_steps: 2}",
    )
    assert found(make_config(), *overrides, world_size=8) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.sequence=true"], "parallel.sequence: true needs parallel.tensor above 1; it is 1"),
        (
            ["parallel.virtual_pipeline=2"],
            "parallel.virtual_pipeline: 2 needs parallel.pipeline above 1 (it interleaves stages); it is 1",
        ),
        (
            ["parallel.pipeline=2", "parallel.virtual_pipeline=4"],
            "parallel.virtual_pipeline: 4 does not divide the 2 layers of a pipeline stage; use 1 or 2",
        ),
        (
            ["parallel={pipeline: 2, virtual_pipeline: 2, first_stage_layers: 1}"],
            "parallel.first_stage_layers: 1 cannot go with parallel.virtual_pipeline 2, which interleaves stages of "
            "one size; use one of the two",
        ),
        (["parallel.last_stage_layers=1"], "parallel.last_stage_layers: 1 needs parallel.pipeline above 1; it is 1"),
        (
            ["parallel={pipeline: 4, first_stage_layers: 2}"],
            "parallel.first_stage_layers: 2 leaves 2 of num_hidden_layers (4) for the 3 other pipeline stages, which "
            "must share them evenly; use 1",
        ),
        (
            ["parallel.expert=2"],
            "parallel.expert: 2 needs a mixture of experts, and Qwen3ForCausalLM has none; use 1",
        ),
        (
            ["parallel.expert_tensor=2"],
            "parallel.expert_tensor: 2 needs a mixture of experts, and Qwen3ForCausalLM has none; use 1",
        ),
        (
            ["rollout={tensor: 2, expert: 2}"],
            "rollout.expert: 2 needs a mixture of experts, and Qwen3ForCausalLM has none; use 1",
        ),
        (
            ["train.mini_batches=3"],
            "train.mini_batches: 3 does not divide rollout.prompts_per_step x rollout.samples_per_prompt (64); "
            "use 1, 2, 4, 8, 16, 32 or 64",
        ),
        (
            ["train.mini_batches=32", "train.split=sample"],
            "train.mini_batches: 32 mini-batches of 2 samples leave some of the 4 data-parallel ranks without one; "
            "use at most 16",
        ),
        (
            ["rollout.prompts_per_step=1", "rollout.samples_per_prompt=2"],
            "rollout.prompts_per_step: 2 samples per step are fewer than the 4 data-parallel ranks; "
            "use at least 2 prompts",
        ),
        (
            ["rollout.samples_per_prompt=1"],
            "rollout.samples_per_prompt: 1 leaves algorithm.advantage 'grpo' no group to compare with (every advantage "
            "would be 0); use at least 2",
        ),
        (
            ["rollout.context_length=13"],
            "rollout.context_length: 13 is shorter than data.max_prompt_tokens + rollout.max_new_tokens (14); "
            "use at least 14, or null",
        ),
        (
            ["rollout.max_total_tokens=13"],
            "rollout.max_total_tokens: a KV cache of 13 tokens does not hold one sample (data.max_prompt_tokens + "
            "rollout.max_new_tokens); use at least 14, or null",
        ),
        (
            ["data.max_prompt_tokens=4096"],
            "data.max_prompt_tokens + rollout.max_new_tokens: 4102 exceeds the model's max_position_embeddings (4096)",
        ),
        (
            ["rollout.context_length=5000"],
            "rollout.context_length: 5000 exceeds the model's max_position_embeddings (4096)",
        ),
        (
            ["critic.warmup_steps=2"],
            "critic.warmup_steps: 2 is given, but algorithm.advantage 'grpo' trains no critic; remove it, or use 'gae'",
        ),
        (
            ["critic.path=x"],
            "critic.path: x is given, but algorithm.advantage 'grpo' trains no critic; remove it, or use 'gae'",
        ),
        (
            ["actor.optimizer.betas=[0.9,1.0]"],
            "actor.optimizer.betas: [0.9, 1.0] is not allowed; use numbers of at least 0 and below 1",
        ),
        (
            ["actor.optimizer={schedule: cosine, lr: 1e-6, min_lr: 1e-5}"],
            "actor.optimizer.min_lr: 1e-05 is above actor.optimizer.lr (1e-06); use at most 1e-06",
        ),
        (["rollout.top_k=0"], "rollout.top_k: 0 is not allowed; use at least 1, or -1 to turn it off"),
        (["rollout.stop_token_ids=[-1]"], "rollout.stop_token_ids: [-1] holds a negative id"),
        (
            ["rollout.stop_token_ids=[13,14]"],
            "rollout.stop_token_ids: [14] lie outside the vocabulary; use ids below 14",
        ),
    ],
)
def test_a_broken_rule_gives_its_one_line(make_config: MakeConfig, overrides: list[str], expected: str) -> None:
    assert found(make_config(), *overrides) == [expected]


def test_a_tensor_size_that_does_not_divide_the_heads_is_told_what_does(
    make_config: MakeConfig, make_model: Any
) -> None:
    make_model(num_attention_heads=32, num_key_value_heads=8, intermediate_size=96)
    assert found(make_config(), "parallel.tensor=3", "rollout.tensor=3", world_size=3) == [
        "parallel.tensor: 3 does not divide num_attention_heads (32); use 1, 2, 4, 8, 16 or 32",
        "parallel.tensor: 3 neither divides num_key_value_heads (8) nor is a multiple of it; use 1, 2, 4, 8, 16 or 32",
        "rollout.tensor: 3 does not divide num_attention_heads (32); use 1, 2, 4, 8, 16 or 32",
        "rollout.tensor: 3 neither divides num_key_value_heads (8) nor is a multiple of it; use 1, 2, 4, 8, 16 or 32",
    ]


def test_layers_that_do_not_divide_are_told_what_does(make_config: MakeConfig, make_model: Any) -> None:
    make_model(num_hidden_layers=6)
    assert found(make_config(), "parallel.pipeline=4") == [
        "parallel.pipeline: 4 does not divide num_hidden_layers (6); use 1, 2, 3 or 6; or set "
        "parallel.first_stage_layers or last_stage_layers"
    ]
    for fitting in ("first_stage_layers: 3", "last_stage_layers: 3", "first_stage_layers: 1, last_stage_layers: 1"):
        assert found(make_config(), f"parallel={{pipeline: 4, {fitting}}}") == []
    assert found(make_config(), "parallel={pipeline: 4, first_stage_layers: 1, last_stage_layers: 2}") == [
        "parallel.last_stage_layers: 2 leaves 3 of num_hidden_layers (6) for the 2 other pipeline stages, which must "
        "share them evenly; use 1 or 3"
    ]


def test_more_ranks_than_kv_heads_may_share_them(make_config: MakeConfig, make_model: Any) -> None:
    assert found(make_config(), "rollout.tensor=4", "parallel.tensor=4") == []
    make_model("shared", num_attention_heads=8, num_key_value_heads=2, head_dim=2)
    model = f"model.path={make_config().parent / 'shared'}"
    assert found(make_config(), model, "parallel.tensor=8", world_size=8) == []
    make_model("odd", num_attention_heads=8, num_key_value_heads=1, head_dim=6, hidden_size=48)
    model = f"model.path={make_config().parent / 'odd'}"
    assert found(make_config(), model, "parallel.tensor=8", world_size=8) == [
        "parallel.tensor: 8 does not divide the rows of queries, keys and values (60)"
    ]


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "intermediate_size": 7,
}
MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "head_dim": None,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 50,
}


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["parallel={tensor: 2, sequence: true, expert: 8, expert_tensor: 2}", "rollout.tensor=4"], 16, []),
        (
            ["parallel={expert: 3, expert_tensor: 5}"],
            15,
            [
                "parallel.expert: 3 does not divide the number of experts (8); use 1, 2, 4 or 8",
                "parallel.expert_tensor: 5 does not divide the width of an expert (48); use 1, 2, 3, 4, 6, 8, 12, 16, "
                "24 or 48",
            ],
        ),
        (
            ["parallel.tensor=2"],
            4,
            [
                "parallel.sequence: false, but Megatron trains a mixture of experts with parallel.tensor above 1 only "
                "with sequence parallelism; set parallel.sequence=true"
            ],
        ),
        (
            ["parallel={pipeline: 2, tensor: 2, sequence: true, expert: 4}"],
            12,
            [
                "world size: 12 is not a multiple of parallel.pipeline x the least common multiple of parallel.tensor "
                "and parallel.expert x parallel.expert_tensor (2 x lcm(2, 4 x 1) = 8); use a multiple of 8 ranks"
            ],
        ),
        (["rollout={tensor: 32, expert: 2}"], 32, []),
        (
            ["rollout={tensor: 16, expert: 16}"],
            16,
            ["rollout.expert: 16 does not divide the number of experts (8); use 1, 2, 4 or 8"],
        ),
        (
            ["rollout={tensor: 8, expert: 3}"],
            8,
            [
                "rollout.expert: 3 does not divide rollout.tensor (8); use 1, 2, 4 or 8",
                "rollout.expert: 3 does not divide the number of experts (8); use 1, 2, 4 or 8",
            ],
        ),
        (
            ["rollout={tensor: 64, expert: 2}"],
            64,
            [
                "rollout.tensor: 64 does not divide num_attention_heads (32); use 1, 2, 4, 8, 16 or 32",
                "rollout.tensor / rollout.expert: 32 does not divide the width of an expert (48); use 1, 2, 3, 4, 6, "
                "8, 12, 16, 24 or 48",
            ],
        ),
        (
            ["rollout.tensor=32"],
            32,
            [
                "rollout.tensor: 32 does not divide the width of an expert (48); use 1, 2, 3, 4, 6, 8, 12, 16, 24 or "
                "48",
            ],
        ),
    ],
)
def test_experts_are_cut_by_their_own_rules(
    make_config: MakeConfig, make_model: Any, overrides: list[str], world_size: int, expected: list[str]
) -> None:
    make_model(**MOE, num_attention_heads=32, hidden_size=1024)
    assert found(make_config(), *overrides, world_size=world_size) == expected


def test_latent_attention_knows_no_kv_heads_and_shared_experts_are_cut_with_the_rest(
    make_config: MakeConfig, make_model: Any
) -> None:
    make_model(**MLA)
    assert found(make_config(), "parallel={tensor: 2, sequence: true}", "rollout.tensor=2") == []
    assert found(make_config(), "parallel={tensor: 4, sequence: true}", "rollout.tensor=3", world_size=12) == [
        "parallel.tensor: 4 does not divide num_attention_heads (6); use 1, 2, 3 or 6",
        "parallel.tensor: 4 does not divide the width of the shared experts (50); use 1, 2, 5, 10, 25 or 50",
        "rollout.tensor: 3 does not divide the width of the shared experts (50); use 1, 2, 5, 10, 25 or 50",
        "rollout.tensor: 3 does not divide the width of an expert (50); use 1, 2, 5, 10, 25 or 50",
    ]


def test_a_wrong_world_size_names_the_sizes_that_work(make_config: MakeConfig) -> None:
    overrides = ("parallel.tensor=2", "parallel.pipeline=2", "rollout.tensor=4")
    assert found(make_config(), *overrides, world_size=6) == [
        "world size: 6 is not a multiple of parallel.tensor x parallel.pipeline (2 x 2 = 4); use a multiple of 4 ranks"
    ]
    assert found(make_config(), "rollout.tensor=4", world_size=6) == [
        "rollout.tensor: 4 does not divide the world size (6); use 1, 2, 3 or 6"
    ]


def test_all_broken_rules_are_reported_at_once(make_config: MakeConfig) -> None:
    overrides = ("parallel.sequence=true", "rollout.samples_per_prompt=1", "rollout.top_k=0", "critic.path=x")
    assert [line.partition(":")[0] for line in found(make_config(), *overrides)] == [
        "parallel.sequence",
        "rollout.samples_per_prompt",
        "critic.path",
        "rollout.top_k",
    ]


def test_a_tokenizer_without_a_template_cannot_render_chat(make_config: MakeConfig, make_model: Any) -> None:
    model = make_model()
    (model / "tokenizer_config.json").unlink()
    (line,) = found(make_config())
    assert line == (
        f"data.chat_template: true, but the tokenizer in {model} has no chat template; for prompts that are text, "
        "set data.chat_template=false"
    )
    assert found(make_config(), "data.chat_template=false") == []


def test_the_values_of_a_reward_model_are_not_taken_for_normalised_ones(
    make_config: MakeConfig, make_model: Any
) -> None:
    critic = make_model("critic", architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    cfg = load(make_config(), ["algorithm.advantage=gae", f"critic.path={critic}", "critic.normalize_returns=true"])
    card = read_model_card(cfg.model.path)
    critic_card = read_model_card(str(critic), key="critic.path", for_critic=True, plans_only=True)
    assert problems(cfg, world_size=2, card=card, critic_card=critic_card) == [
        f"critic.normalize_returns: true cannot go with critic.path {critic}, a reward model: its values are rewards, "
        "and after the first step would be read as normalised ones; use false"
    ]


def test_a_critic_of_its_own_is_cut_like_the_actor_and_knows_its_tokens(
    make_config: MakeConfig, make_model: Any
) -> None:
    critic = make_model("critic", num_hidden_layers=3, vocab_size=10)
    cfg = load(make_config(), ["algorithm.advantage=gae", f"critic.path={critic}", "parallel.pipeline=2"])
    card, critic_card = read_model_card(cfg.model.path), read_model_card(str(critic))
    assert problems(cfg, world_size=4, card=card, critic_card=critic_card) == [
        "parallel.pipeline: 2 does not divide num_hidden_layers of critic.path (3); use 1 or 3; or set "
        "parallel.first_stage_layers or last_stage_layers",
        "critic.path: a vocabulary of 10 does not hold the token ids of model.path (14); use a critic with the same "
        "tokenizer",
    ]


def test_an_unknown_name_is_told_the_nearest_one_and_own_functions_pass(make_config: MakeConfig) -> None:
    known = {"algorithm.advantage": {"grpo", "gae"}, "reward.name": {"exact_answer"}}
    path = make_config()
    assert found(path, "reward.name=exact_anwser", known=known) == [
        "reward.name: 'exact_anwser' is not known; did you mean 'exact_answer'?"
    ]
    assert found(path, "algorithm.advantage=zzz", known=known) == [
        "algorithm.advantage: 'zzz' is not known; use gae or grpo, or 'package.module:function'"
    ]
    assert found(path, "reward.name=my.module:fn", known=known) == []


@pytest.mark.parametrize(
    ("override", "opening"),
    [
        ("rollout.top_p=0.9", "rollout.top_p: 0.9 cuts the distribution"),
        ("rollout.top_k=50", "rollout.top_k: 50 cuts the distribution"),
        ("algorithm.kl={where: loss, coef: 0}", "algorithm.kl.coef: 0 with algorithm.kl.where 'loss'"),
        ("algorithm.kl={where: loss, estimator: k1}", "algorithm.kl.estimator: 'k1' in the loss reports"),
        ("eval.every=5", "eval.every: 5 has no effect without eval.sets"),
        ("algorithm.clip_low=0.3", "algorithm.clip_low: 0.3 is wider than algorithm.clip_high (0.2)"),
        ("actor.optimizer.warmup_steps=10", "actor.optimizer.warmup_steps: the run's 10 optimizer steps"),
    ],
)
def test_a_doubtful_choice_warns_and_is_no_problem(make_config: MakeConfig, override: str, opening: str) -> None:
    path = make_config()
    assert found(path, override) == []
    (line,) = warned(path, override)
    assert line.startswith(opening)


def test_a_sound_config_gives_no_warning(make_config: MakeConfig) -> None:
    assert warned(make_config()) == []


def test_fewer_prompts_than_engines_warns(make_config: MakeConfig) -> None:
    assert warned(make_config(), "rollout.prompts_per_step=2", world_size=4) == [
        "rollout.prompts_per_step: 2 prompts for 4 engines: some engines get none"
    ]


@pytest.mark.parametrize("transport", ["peer", "collective"])
def test_weights_cannot_be_widened_on_their_way_without_whole_tensors(make_config: MakeConfig, transport: str) -> None:
    settings = ("model.dtype=bf16", "rollout.dtype=fp32", f"weight_sync.transport={transport}")
    (problem,) = found(make_config(), *settings)
    assert problem.startswith(f"weight_sync.transport: '{transport}' cannot turn the learner's bf16 weights")
    assert (
        found(make_config(), *settings[:2])
        == found(make_config(), *settings[:2], "weight_sync.transport=hf_stream")
        == []
    )
