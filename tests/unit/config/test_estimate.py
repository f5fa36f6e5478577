"""Parameters and memory of a rank against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.config.estimate import activation_bytes, memory_of, rank_parameters
from rlmegatron.config.layout import Layout, layout_of
from rlmegatron.config.load import load
from rlmegatron.config.model_card import ModelCard
from rlmegatron.config.partition import padded_vocab
from rlmegatron.models.card import read_model_card
from rlmegatron.models.table import read_architecture


def layout(*, tensor: int = 1, pipeline: int = 1, data: int = 1, expert: int = 1, expert_tensor: int = 1) -> Layout:
    return Layout(
        world=tensor * pipeline * data,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=1,
        engine_tensor=1,
        expert=expert,
        expert_tensor=expert_tensor,
    )


@pytest.fixture
def card(make_model: Callable[..., Path]) -> ModelCard:
    return read_model_card(str(make_model()))


def test_vocabulary_is_padded_as_the_learner_pads_it(make_model: Callable[..., Path]) -> None:
    assert [padded_vocab(14, tensor=tensor) for tensor in (1, 2, 4)] == [16, 16, 32]
    for number, vocab_size in enumerate((14, 151936, 32001)):
        learner = read_architecture(str(make_model(f"model{number}", vocab_size=vocab_size)))
        for tensor in (1, 2, 8):
            assert padded_vocab(vocab_size, tensor=tensor) == learner.padded_vocab(tensor)


def test_stage_parameters_add_up_to_the_model_with_its_padding_and_its_copy_of_the_embedding(card: ModelCard) -> None:
    whole = card.num_parameters + 2 * 128
    assert rank_parameters(card, layout(), 0).total == whole
    stages = [rank_parameters(card, layout(pipeline=2), stage).total for stage in range(2)]
    assert sum(stages) == whole + 16 * 128
    assert stages[0] == 2 * 246_080 + 16 * 128
    assert stages[1] == 2 * 246_080 + 16 * 128 + 128


def test_critic_has_one_row_in_place_of_the_output_layer(card: ModelCard) -> None:
    tied, value = (rank_parameters(card, layout(), 0, value_head=head).total for head in (False, True))
    assert value - tied == 128


@pytest.mark.parametrize(
    ("dtype", "shards", "weights", "optimizer"),
    [("bf16", True, 2, 12 / 4), ("bf16", False, 2, 12), ("fp32", True, 4, 2)],
)
def test_training_bytes_per_parameter(
    make_config: Callable[..., Path], dtype: str, shards: bool, weights: int, optimizer: float
) -> None:
    path = make_config({"model.dtype": dtype, "parallel.distributed_optimizer": shards})
    cfg = load(path, ["algorithm.advantage=gae", "algorithm.kl.where=loss"])
    card = read_model_card(cfg.model.path)
    sizes = layout_of(cfg, world_size=4)
    count = rank_parameters(card, sizes, 0).total
    memory = memory_of(cfg, sizes, card, 0, critic_card=None)
    assert memory.weights == memory.reference == count * weights
    assert memory.gradients == 4 * count
    assert memory.optimizer == count * optimizer
    assert memory.critic == (count + 128) * (weights + 4 + optimizer)
    assert memory.kv_cache is None
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.reference, memory.critic)
    assert memory.training == sum(parts) + memory.activations + memory.logits


def test_engine_memory_follows_its_own_tensor_parallelism_and_type(make_config: Callable[..., Path]) -> None:
    path = make_config({"rollout.tensor": 2, "rollout.dtype": "fp32", "rollout.max_total_tokens": 1000})
    cfg = load(path)
    memory = memory_of(cfg, layout_of(cfg, world_size=2), read_model_card(cfg.model.path), 0, critic_card=None)
    assert memory.kv_cache == 1000 * 2 * 4 * (2 // 2) * 32 * 4
    cut = 4 * (128 * (2 * 128 + 2 * 64) + 3 * 128 * 512) // 2
    assert memory.engine == 4 * (cut + 4 * (2 * 128 + 2 * 32) + 8 * 128 + 128)


def test_activations_of_one_layer_are_counted_by_hand(make_config: Callable[..., Path], card: ModelCard) -> None:
    model = load(make_config()).model
    per_token = 4 * 128 + 2 * (4 + 2) * 32 + 3 * 512
    sizes = layout(tensor=2, pipeline=4)
    first = activation_bytes(card, sizes, 0, model=model, tokens=10, sequence=False)
    assert first == (4 * 128 + (2 * 6 * 32 + 3 * 512) // 2) * 10 * 2 * 4
    assert activation_bytes(card, sizes, 3, model=model, tokens=10, sequence=False) * 4 == first
    assert activation_bytes(card, sizes, 0, model=model, tokens=10, sequence=True) == per_token // 2 * 10 * 2 * 4
    full = model.model_copy(update={"recompute": "full"})
    assert activation_bytes(card, layout(), 0, model=full, tokens=10, sequence=False) == (4 * 128 + per_token) * 10 * 2


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [0],
}
MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def test_experts_are_spread_and_cut_on_their_own_axes_and_the_rest_on_tensor_parallelism(
    make_model: Callable[..., Path],
) -> None:
    card = read_model_card(str(make_model(**MOE)))
    experts = 3 * (8 * 3 * 64 * 128)
    one_rank = rank_parameters(card, layout(), 0)
    assert one_rank.expert == experts
    cut = rank_parameters(card, layout(tensor=2, data=4, expert=2, expert_tensor=2), 0)
    assert cut.expert == experts // 4
    routers, norms = 3 * 8 * 128, 4 * (2 * 128 + 2 * 32) + 128
    assert cut.dense - routers - norms == (one_rank.dense - routers - norms) // 2
    last = rank_parameters(card, layout(pipeline=2), 1)
    assert last.expert == experts // 3 * 2


def test_optimizer_state_of_experts_is_shared_by_the_ranks_that_hold_the_same_ones(
    make_config: Callable[..., Path], make_model: Callable[..., Path]
) -> None:
    make_model(**MOE)
    cfg = load(make_config(), ["parallel.expert=2"])
    card, sizes = read_model_card(cfg.model.path), layout_of(cfg, world_size=4)
    held = rank_parameters(card, sizes, 0)
    memory = memory_of(cfg, sizes, card, 0, critic_card=None)
    assert memory.weights == 2 * held.total
    assert memory.optimizer == 12 * held.dense // 4 + 12 * held.expert // 2


def test_activations_of_experts_are_those_of_the_ones_a_token_visits(
    make_config: Callable[..., Path], make_model: Callable[..., Path]
) -> None:
    model, card = load(make_config()).model, read_model_card(str(make_model("moe", **MOE)))
    attention = 2 * (4 + 2) * 32
    dense_layer = 4 * 128 + attention + 3 * 512
    moe_layer = 4 * 128 + 8 + attention + 2 * (128 + 3 * 64)
    assert activation_bytes(card, layout(), 0, model=model, tokens=10, sequence=False) == (
        (dense_layer + 3 * moe_layer) * 10 * 2
    )
    # Two ranks that share their experts have half of the tokens each, and each other's beside their own.
    halves = layout(tensor=2, expert_tensor=2)
    moe_layer = (4 * 128 + 8) // 2 + attention // 2 + 2 * (2 * 128 + 3 * 64) // 2
    assert activation_bytes(card, halves, 0, model=model, tokens=10, sequence=True) == (
        (dense_layer // 2 + 3 * moe_layer) * 10 * 2
    )


def test_latent_attention_keeps_its_own_widths_and_caches_the_latent_on_every_rank(
    make_config: Callable[..., Path], make_model: Callable[..., Path]
) -> None:
    make_model(**MLA)
    cfg = load(make_config(), ["rollout.tensor=2", "rollout.max_total_tokens=1000"])
    card, sizes = read_model_card(cfg.model.path), layout_of(cfg, world_size=2)
    assert memory_of(cfg, sizes, card, 0, critic_card=None).kv_cache == 1000 * 4 * (32 + 8) * 2
    queries_keys_values_outcome = 4 * (24 + 24 + 24 + 24)
    latent = 2 * 48 + 2 * 32 + 8
    moe = 8 + 3 * 64 + 2 * (128 + 3 * 64)
    assert activation_bytes(card, sizes, 0, model=cfg.model, tokens=10, sequence=False) == (
        4 * (4 * 128 + latent + queries_keys_values_outcome + moe) * 10 * 2
    )
