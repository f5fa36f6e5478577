"""Layers of pipeline stages against Megatron's own arithmetic."""

from __future__ import annotations

import pytest

from rlmegatron.config.partition import stage_sizes


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "first", "last"),
    [
        (8, 1, 1, None, None),
        (8, 4, 1, None, None),
        (24, 2, 3, None, None),
        (61, 16, 1, 4, 1),
        (61, 16, 1, 1, None),
        (61, 8, 1, None, 5),
        (7, 2, 1, 3, 4),
        (5, 2, 1, 4, None),
    ],
)
def test_stages_hold_as_many_layers_as_megatron_builds(
    num_layers: int, pp: int, vpp: int, first: int | None, last: int | None
) -> None:
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    torch = pytest.importorskip("torch")
    config = block.TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=torch.float32,
    )
    sizes = stage_sizes(num_layers=num_layers, pp=pp, vpp=vpp, first=first, last=last)
    assert sum(sizes) * vpp == num_layers
    for rank in range(pp):
        for chunk in range(vpp):
            assert block.get_num_layers_to_build(config, chunk if vpp > 1 else None, rank) == sizes[rank]


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "first", "last"),
    [
        (6, 4, 1, None, None),
        (8, 2, 3, None, None),
        (6, 4, 1, 1, None),
        (6, 4, 1, 6, None),
        (6, 4, 1, 2, 4),
        (6, 4, 1, 7, None),
        (6, 2, 1, 3, 2),
        (6, 1, 1, 3, 3),
        (8, 2, 2, 2, None),
    ],
)
def test_stages_that_do_not_come_out_even_or_hold_nothing_are_refused(
    num_layers: int, pp: int, vpp: int, first: int | None, last: int | None
) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        stage_sizes(num_layers=num_layers, pp=pp, vpp=vpp, first=first, last=last)
