"""SGLang's answers become samples; answers that do not hold together are errors."""

import base64
import math
from typing import Any

import numpy as np
import pytest

from rlmegatron.rollout.answers import to_sample, versions_per_token
from rlmegatron.rollout.api import EngineError, GenerationRequest, RoutedLayers

REQUEST = GenerationRequest(prompt_id=7, index=3, token_ids=(1, 2), seed=0)


def answer(**changes: Any) -> dict[str, Any]:
    meta = {
        "output_token_logprobs": [[-0.5, 11, None], [-1.5, 2, None]],
        "weight_versions": [{"version": "4", "start": 0, "end": 2}],
        "finish_reason": {"type": "stop", "matched": 2},
    }
    return {"output_ids": [11, 2], "meta_info": {**meta, **changes}}


def test_a_sample_keeps_tokens_scores_and_versions() -> None:
    sample = to_sample(REQUEST, answer(), None)
    assert (sample.prompt_id, sample.index, sample.token_ids) == (7, 3, (11, 2))
    assert sample.logprobs == (-0.5, -1.5)
    assert sample.weight_versions == (4, 4)
    assert sample.finish_reason == "stop"
    assert sample.text == ""


def test_text_is_what_the_decoder_makes_of_the_tokens() -> None:
    assert to_sample(REQUEST, answer(), lambda ids: "+".join(map(str, ids))).text == "11+2"


def test_scores_of_other_tokens_are_an_error() -> None:
    with pytest.raises(EngineError, match=r"prompt 7: the engine scored \[11\] but sampled \(11, 2\)"):
        to_sample(REQUEST, answer(output_token_logprobs=[[-0.5, 11, None]]), None)


@pytest.mark.parametrize("logp", [None, math.nan, -math.inf])
def test_a_log_probability_that_is_no_number_is_an_error(logp: float | None) -> None:
    with pytest.raises(
        EngineError, match=r"prompt 7, sample 3: the engine's log-probability of token 1 is (None|nan|-inf)"
    ):
        to_sample(REQUEST, answer(output_token_logprobs=[[-0.5, 11, None], [logp, 2, None]]), None)


def encoded(shape: tuple[int, ...]) -> str:
    """As SGLang sends them: int32 0, 1, 2, ... [tokens, all layers, experts of a token] in base64."""
    return base64.b64encode(np.arange(np.prod(shape), dtype=np.int32).tobytes()).decode()


def test_experts_are_those_of_all_tokens_but_the_last_in_the_layers_that_have_some() -> None:
    """Two prompt tokens, two of the answer; of three layers the first is dense, and SGLang fills its place."""
    routed = RoutedLayers(num_layers=3, layers=(1, 2), top_k=2)
    experts = to_sample(REQUEST, answer(routed_experts=encoded((3, 3, 2))), None, routed=routed).routed_experts
    assert experts is not None and (experts.num_tokens, experts.num_layers, experts.top_k) == (3, 2, 2)
    found = np.frombuffer(experts.data, dtype=np.int16).reshape(3, 2, 2).tolist()
    assert found == [[[2, 3], [4, 5]], [[8, 9], [10, 11]], [[14, 15], [16, 17]]]
    assert to_sample(REQUEST, answer(), None).routed_experts is None


def test_experts_of_another_number_of_tokens_are_an_error() -> None:
    routed = RoutedLayers(num_layers=3, layers=(1, 2), top_k=2)
    with pytest.raises(EngineError, match=r"prompt 7: the engine names 24 experts, must be \(3, 3, 2\)"):
        to_sample(REQUEST, answer(routed_experts=encoded((4, 3, 2))), None, routed=routed)


def test_experts_that_the_engine_has_not_noted_are_an_error() -> None:
    """SGLang then sends zeros, which would all be expert 0."""
    table = np.arange(18, dtype=np.int32).reshape(3, 3, 2)
    table[1, 2] = 0
    told = base64.b64encode(table.tobytes()).decode()
    with pytest.raises(EngineError, match="prompt 7: the engine does not know the experts of every token"):
        to_sample(REQUEST, answer(routed_experts=told), None, routed=RoutedLayers(3, (1, 2), 2))
    dense_layer_zero = to_sample(REQUEST, answer(routed_experts=told), None, routed=RoutedLayers(3, (0, 1), 2))
    assert dense_layer_zero.routed_experts is not None


def test_an_answer_over_two_versions_names_the_version_of_every_token() -> None:
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 5}]
    assert versions_per_token(spans, num_tokens=5) == (1, 1, 2, 2, 2)


def test_an_empty_answer_has_no_versions() -> None:
    assert versions_per_token([{"version": "3", "start": 0, "end": 0}], num_tokens=0) == ()


@pytest.mark.parametrize("spans", [[{"version": "1", "start": 1, "end": 3}], [{"version": "1", "start": 0, "end": 2}]])
def test_versions_that_do_not_cover_the_answer_are_an_error(spans: list[dict[str, Any]]) -> None:
    with pytest.raises(EngineError, match="weight versions"):
        versions_per_token(spans, num_tokens=3)
