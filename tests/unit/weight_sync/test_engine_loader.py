"""Buckets are cut so that SGLang's loaders, which remember nothing between calls, find what belongs together."""

from __future__ import annotations

import pytest
from random_checkpoint import architecture

from rlmegatron.weight_sync.engine_loader import loadable

Q, KV = "model.layers.{}.self_attn.q_a_proj.weight", "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight"


def test_latent_projections_of_a_layer_come_in_one_bucket() -> None:
    """Whichever is first is held back, over any number of buckets; everything else stays where it is."""
    arch = architecture("DeepseekV3ForCausalLM")
    sent = [[(KV.format(0), 1), ("a", 2)], [(Q.format(1), 3)], [("b", 4), (Q.format(0), 5), (KV.format(1), 6)]]
    assert list(loadable(sent, arch)) == [
        [("a", 2)],
        [],
        [("b", 4), (KV.format(0), 1), (Q.format(0), 5), (Q.format(1), 3), (KV.format(1), 6)],
    ]


def test_nothing_is_held_back_where_nothing_is_fused() -> None:
    arch = architecture("DeepseekV2ForCausalLM")
    assert list(loadable([[(KV.format(0), 1)], [("b", 2)]], arch)) == [[(KV.format(0), 1)], [("b", 2)]]


def test_a_partner_that_never_comes_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="q_a_proj"):
        list(loadable([[(Q.format(0), 1)]], architecture("DeepseekV3ForCausalLM")))


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_also_the_head_where_sglang_has_a_head_of_its_own(name: str, tied: bool) -> None:
    arch = architecture(name, tie_word_embeddings=tied)
    head = [("lm_head.weight", 1)] if tied and "Moe" in name else []
    assert list(loadable([[("model.embed_tokens.weight", 1)]], arch)) == [[("model.embed_tokens.weight", 1), *head]]
