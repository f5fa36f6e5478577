"""SGLang's answers become samples; answers that do not hold together are errors."""

from typing import Any

import pytest

from rlmegatron.rollout.answers import to_sample, versions_per_token
from rlmegatron.rollout.api import EngineError, GenerationRequest

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


def test_an_answer_over_two_versions_names_the_version_of_every_token() -> None:
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 5}]
    assert versions_per_token(spans, num_tokens=5) == (1, 1, 2, 2, 2)


def test_an_empty_answer_has_no_versions() -> None:
    assert versions_per_token([{"version": "3", "start": 0, "end": 0}], num_tokens=0) == ()


@pytest.mark.parametrize("spans", [[{"version": "1", "start": 1, "end": 3}], [{"version": "1", "start": 0, "end": 2}]])
def test_versions_that_do_not_cover_the_answer_are_an_error(spans: list[dict[str, Any]]) -> None:
    with pytest.raises(EngineError, match="weight versions"):
        versions_per_token(spans, num_tokens=3)
