"""Which experts a token goes to, and with which weights, against transformers' own modules on the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlmegatron.learner.router import route
from rlmegatron.models.architecture import Experts

T, E = 200, 16
Reference = Callable[[Tensor], tuple[Tensor, Tensor]]
"""logits [T E] -> (chosen [T K], weights [T K])."""


def experts(**changes: Any) -> Experts:
    return Experts(**{"num": E, "top_k": 4, "ffn": 8, "layers": (0,), **changes})


V3: dict[str, Any] = {"scoring": "sigmoid", "scale": 2.5, "group_best": 2, "bias": True}


def qwen3_moe(spec: Experts) -> Reference:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(
        num_experts=spec.num, num_experts_per_tok=spec.top_k, norm_topk_prob=spec.normalize, hidden_size=spec.num
    )
    return of_gate(Qwen3MoeTopKRouter(config))


def mixtral(spec: Experts) -> Reference:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    config = MixtralConfig(num_local_experts=spec.num, num_experts_per_tok=spec.top_k, hidden_size=spec.num)
    return of_gate(MixtralTopKRouter(config))


def of_gate(gate: nn.Module) -> Reference:
    """The gate's weight becomes the identity, so that hidden states are logits."""
    with torch.no_grad():
        gate.weight.copy_(torch.eye(len(gate.weight)))

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        _, weights, chosen = gate.to(logits.dtype)(logits)
        return chosen, weights

    return choose


def deepseek_v2(spec: Experts) -> Reference:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    module = DeepseekV2Moe(
        DeepseekV2Config(
            n_routed_experts=spec.num,
            num_experts_per_tok=spec.top_k,
            topk_method="group_limited_greedy" if spec.num_groups > 1 else "greedy",
            n_group=spec.num_groups,
            topk_group=spec.top_groups,
            routed_scaling_factor=spec.scale,
            moe_intermediate_size=8,
            hidden_size=32,
        )
    )
    module.num_experts = spec.num  # transformers 5.12 reads it and never sets it
    return lambda logits: module.route_tokens_to_experts(logits[None])


def deepseek_v3(spec: Experts) -> Reference:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    module = DeepseekV3MoE(
        DeepseekV3Config(
            n_routed_experts=spec.num,
            num_experts_per_tok=spec.top_k,
            n_group=spec.num_groups,
            topk_group=spec.top_groups,
            norm_topk_prob=spec.normalize,
            routed_scaling_factor=spec.scale,
            moe_intermediate_size=8,
            hidden_size=32,
        )
    )
    module.gate.e_score_correction_bias.copy_(bias_of(spec))
    return module.route_tokens_to_experts


def bias_of(spec: Experts) -> Tensor | None:
    return torch.linspace(-0.3, 0.4, spec.num).roll(5) if spec.bias else None


CASES: dict[str, tuple[Callable[[Experts], Reference], Experts]] = {
    "qwen3-moe": (qwen3_moe, experts(normalize=True)),
    "qwen3-moe, not normalised": (qwen3_moe, experts(normalize=False)),
    "qwen3-moe, one expert": (qwen3_moe, experts(top_k=1, normalize=True)),
    "mixtral": (mixtral, experts(top_k=2)),
    "mixtral, all experts": (mixtral, experts(top_k=E)),
    "deepseek-v2-lite": (deepseek_v2, experts(normalize=False)),
    "deepseek-v2": (deepseek_v2, experts(normalize=False, scale=16.0, num_groups=8, top_groups=3)),
    "deepseek-v2, two groups": (deepseek_v2, experts(normalize=False, scale=1.7, num_groups=2, top_groups=1)),
    "deepseek-v3": (deepseek_v3, experts(**V3, num_groups=4, top_groups=2)),
    "deepseek-v3, one group": (deepseek_v3, experts(**V3)),
    "deepseek-v3, not normalised": (deepseek_v3, experts(**V3, num_groups=8, top_groups=3, normalize=False)),
}


def random_logits(spread: float = 2.0) -> Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(0)) * spread


def spread_out(chosen: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros(len(chosen), E, dtype=weights.dtype).scatter(1, chosen, weights)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_choice_and_weights_are_those_of_transformers(case: str, spread: float) -> None:
    reference, spec = CASES[case]
    logits = random_logits(spread)
    chosen, weights = reference(spec)(logits)
    found, is_chosen = route(logits, bias_of(spec), spec)
    assert torch.equal(is_chosen, torch.zeros(T, E, dtype=torch.bool).scatter(1, chosen, True))
    torch.testing.assert_close(found, spread_out(chosen, weights), rtol=1e-6, atol=0)
    assert found.dtype == torch.float32 and (is_chosen.sum(1) == spec.top_k).all()


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_logits_are_those_of_transformers(case: str) -> None:
    """Of a loss that weighs each expert's share of each token differently; the choice itself has no gradient."""
    reference, spec = CASES[case]
    pull = torch.randn(T, E, generator=torch.Generator().manual_seed(1))
    gradients = []
    for choose in (lambda x: route(x, bias_of(spec), spec)[0], lambda x: spread_out(*reference(spec)(x))):
        logits = random_logits().requires_grad_()
        (choose(logits) * pull).sum().backward()
        gradients.append(logits.grad)
    assert gradients[0] is not None
    is_constant = spec.normalize and spec.top_k == 1
    assert bool(gradients[0].abs().max() > 1e-3) is not is_constant
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral", "deepseek-v2", "deepseek-v3"])
def test_bf16_logits_are_weighed_in_fp32(case: str) -> None:
    """transformers' Qwen3-MoE rounds its weights to bf16 in the end, so there they are compared as such."""
    reference, spec = CASES[case]
    logits = random_logits().bfloat16()
    found, is_chosen = route(logits, bias_of(spec), spec)
    assert torch.equal(found, route(logits.float(), bias_of(spec), spec)[0])
    if case == "deepseek-v3":
        logits = logits.float()  # as its own gate gives them
    chosen, weights = reference(spec)(logits)
    assert torch.equal(is_chosen, torch.zeros(T, E, dtype=torch.bool).scatter(1, chosen, True))
    torch.testing.assert_close(found.to(weights.dtype), spread_out(chosen, weights))


def test_groups_are_worth_their_two_best_with_the_bias_and_weights_are_without_it() -> None:
    """By hand: 4 groups of 2, the best 2 groups, the best 2 experts.

    Scores with the bias: .5 .5 | .9 .05 | .6 .6 | .1 .1, so groups 2 and 0 (1.2 and 1.0) beat group 1 (0.95), which
    has the best expert of all; of groups 0 and 2 experts 4 and 5 are chosen. Without the bias they score .4 and .6.
    """
    scores = torch.tensor([[0.5, 0.5, 0.9, 0.05, 0.4, 0.6, 0.1, 0.1]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0])
    spec = experts(num=8, top_k=2, **{**V3, "scale": 1.0}, num_groups=4, top_groups=2)
    found, is_chosen = route(torch.logit(scores), bias, spec)
    assert is_chosen[0].tolist() == [False, False, False, False, True, True, False, False]
    torch.testing.assert_close(found[0, 4:6], torch.tensor([0.4, 0.6]))


def test_a_bias_below_every_score_still_keeps_to_the_best_groups() -> None:
    """Scores for the choice may be negative: experts outside the best groups are out, not just at 0."""
    spec = experts(num=4, top_k=2, **V3, num_groups=2, top_groups=1)
    bias = torch.tensor([-3.0, -3.0, -4.0, -4.0])
    _, is_chosen = route(torch.zeros(1, 4), bias, spec)
    assert is_chosen[0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("case", CASES)
def test_equal_logits_choose_as_many_experts_and_weigh_them_alike(case: str) -> None:
    _, spec = CASES[case]
    found, is_chosen = route(torch.zeros(T, E), None, spec)
    assert (is_chosen.sum(1) == spec.top_k).all()
    share = 1 / spec.top_k if spec.normalize else {"softmax": 1 / E, "sigmoid": 0.5}[spec.scoring]
    assert torch.equal(found > 0, is_chosen)
    torch.testing.assert_close(found[is_chosen], torch.full((T * spec.top_k,), share * spec.scale))
    groups = is_chosen.view(T, spec.num_groups, -1).any(2).sum(1)
    assert (groups <= spec.top_groups).all()


def test_scores_that_vanish_give_no_weight_and_no_nan() -> None:
    found, is_chosen = route(torch.full((1, E), -200.0), None, experts(**V3))
    assert (found == 0).all() and is_chosen.sum() == 4
