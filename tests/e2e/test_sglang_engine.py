"""A real SGLang engine on a tiny random Qwen3, compared with Hugging Face on the same weights; one serves all tests."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import (
    EOS,
    LOADER,
    PROMPTS,
    SAMPLING,
    VOCAB,
    hf_tensors,
    logprobs_of,
    make_engine,
    processes_of_group,
    publish,
    requests,
    shared_memory_files,
    tiny_model,
    wait_until_gone,
)

from rlmegatron.config.schema import RolloutConfig
from rlmegatron.rollout.api import EngineError, GenerationRequest, SamplingConfig
from rlmegatron.rollout.sglang_engine import SGLangEngine

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model(seed=1).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def loader_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("loader")
    (directory / "engine_test_loader.py").write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "def add_rank_share(model, named_tensors):\n"
        "    parameters = dict(model.named_parameters())\n"
        "    for name, tensor in named_tensors:\n"
        "        parameters[name].data.add_(tensor)\n"
    )
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(directory) + (os.pathsep + before if before else "")
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def engine(model_dir: Path, loader_path: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    engine = make_engine(model_dir, tmp_path_factory.mktemp("log") / "engine.log", custom_weight_loaders=(LOADER,))
    engine.wait_ready()
    yield engine
    group = engine._server.pid
    files = shared_memory_files(group)
    assert files
    engine.shutdown()
    engine.shutdown()
    assert wait_until_gone(group) == []
    assert not any(path.exists() for path in files)


@pytest.fixture
def served(engine: SGLangEngine, model_dir: Path) -> tuple[SGLangEngine, Any]:
    model = tiny_model(seed=1)
    publish(engine, model, version=1)
    return engine, model


def test_logprobs_equal_hugging_face(served: tuple[SGLangEngine, Any]) -> None:
    engine, model = served
    for prompt, sample in zip(PROMPTS, engine.generate(requests(PROMPTS), SAMPLING), strict=True):
        assert sample.logprobs == pytest.approx(logprobs_of(model, prompt, sample), abs=1e-5)


def test_logprobs_are_those_of_the_sampling_temperature(served: tuple[SGLangEngine, Any]) -> None:
    engine, model = served
    warm = SamplingConfig(temperature=1.7, max_new_tokens=12)
    for prompt, sample in zip(PROMPTS, engine.generate(requests(PROMPTS), warm), strict=True):
        assert sample.logprobs == pytest.approx(logprobs_of(model, prompt, sample, 1.7), abs=1e-5)


def test_new_weights_are_used_and_their_version_is_carried(served: tuple[SGLangEngine, Any]) -> None:
    engine, _ = served
    engine.generate(requests(PROMPTS), SAMPLING)  # fills the KV cache with what the old weights computed
    other = tiny_model(seed=2)
    publish(engine, other, version=7)
    for prompt, sample in zip(PROMPTS, engine.generate(requests(PROMPTS), SAMPLING), strict=True):
        assert sample.logprobs == pytest.approx(logprobs_of(other, prompt, sample), abs=1e-5)
        assert sample.weight_versions == (7,) * len(sample.token_ids)


def test_a_seed_gives_the_same_sample_in_every_batch(served: tuple[SGLangEngine, Any]) -> None:
    engine, _ = served
    prompts = PROMPTS * 40
    together = engine.generate(requests(prompts), SAMPLING)
    for i in (0, 1, 77, 159):
        alone = engine.generate([requests(prompts)[i]], SAMPLING)[0]
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=1e-5)
    assert len({sample.token_ids for sample in together[:: len(PROMPTS)]}) > 30


def test_samples_follow_the_model_distribution(served: tuple[SGLangEngine, Any]) -> None:
    engine, model = served
    prompt = (5, 6, 7, 8)
    num = 4096
    one_token = SamplingConfig(temperature=1.0, max_new_tokens=1)
    samples = engine.generate(requests([prompt] * num, first_seed=10**12), one_token)
    counts = torch.bincount(torch.tensor([sample.token_ids[0] for sample in samples]), minlength=VOCAB).double()
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1) * num
    likely = expected > 5
    chi_square = ((counts - expected) ** 2 / expected)[likely].sum().item()
    assert chi_square < 2.2 * likely.sum().item()  # far beyond the 0.1 % point for 20 degrees of freedom and more


@pytest.mark.parametrize("sampling", [SamplingConfig(1.0, 8, top_k=3), SamplingConfig(1.0, 8, top_p=0.5)])
def test_top_k_and_top_p_bound_the_sample(served: tuple[SGLangEngine, Any], sampling: SamplingConfig) -> None:
    engine, model = served
    for prompt, sample in zip(PROMPTS * 8, engine.generate(requests(PROMPTS * 8), sampling), strict=True):
        with torch.no_grad():
            table = model(torch.tensor([prompt + sample.token_ids])).logits[0].softmax(-1)
        for i, token in enumerate(sample.token_ids):
            row = table[len(prompt) - 1 + i]
            more_likely = row > row[token] + 1e-6
            assert int(more_likely.sum()) < (sampling.top_k if sampling.top_k > 0 else VOCAB)
            assert float(row[more_likely].sum()) <= sampling.top_p + 1e-5


def test_temperature_zero_is_greedy(served: tuple[SGLangEngine, Any]) -> None:
    engine, model = served
    samples = engine.generate(requests(PROMPTS), SamplingConfig(temperature=0.0, max_new_tokens=6))
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        sequence = list(prompt)
        for token in sample.token_ids:
            with torch.no_grad():
                assert token == int(model(torch.tensor([sequence])).logits[0, -1].argmax())
            sequence.append(token)


def test_an_answer_ends_in_eos_or_at_its_length(served: tuple[SGLangEngine, Any]) -> None:
    engine, _ = served
    samples = engine.generate(requests(PROMPTS * 16), SAMPLING)
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        assert EOS not in sample.token_ids[:-1]
        if sample.finish_reason == "stop":
            assert sample.token_ids[-1] == EOS
        else:
            assert len(sample.token_ids) == 12 and sample.token_ids[-1] != EOS


def test_further_stop_tokens_end_an_answer(served: tuple[SGLangEngine, Any]) -> None:
    engine, _ = served
    stops = (3, 4, 5, 6, 7, 8, 9, 10)
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=12, stop_token_ids=stops)
    samples = engine.generate(requests(PROMPTS * 8), sampling)
    ended = [sample for sample in samples if sample.finish_reason == "stop"]
    assert any(sample.token_ids[-1] in stops for sample in ended)
    assert all(set(sample.token_ids[:-1]).isdisjoint({*stops, EOS}) for sample in samples)


def test_an_engine_asleep_refuses_to_generate_until_it_is_published_again(served: tuple[SGLangEngine, Any]) -> None:
    engine, model = served
    engine.sleep()
    with pytest.raises(EngineError, match="asleep \\(kv_cache, weights\\)"):
        engine.generate(requests(PROMPTS), SAMPLING)
    with pytest.raises(EngineError, match="weights are asleep"):
        engine.begin_weight_update()
    engine.wake(weights=True)
    with pytest.raises(EngineError, match="asleep \\(kv_cache\\)"):
        engine.generate(requests(PROMPTS), SAMPLING)
    engine.wake(kv_cache=True)
    with pytest.raises(EngineError, match="no weights were published"):
        engine.generate(requests(PROMPTS), SAMPLING)
    publish(engine, model, version=3)
    assert engine.generate(requests(PROMPTS), SAMPLING)[0].weight_versions[0] == 3


def test_an_engine_refuses_to_generate_during_an_update(served: tuple[SGLangEngine, Any]) -> None:
    engine, model = served
    engine.begin_weight_update()
    with pytest.raises(EngineError, match="a weight update is open"):
        engine.generate(requests(PROMPTS), SAMPLING)
    with pytest.raises(EngineError, match="open already"):
        engine.begin_weight_update()
    with pytest.raises(EngineError, match="cannot sleep during a weight update"):
        engine.sleep()
    engine.update_weights(hf_tensors(model))
    engine.end_weight_update(version=4)
    assert engine.generate(requests(PROMPTS), SAMPLING)[0].weight_versions[0] == 4
    with pytest.raises(EngineError, match="no weight update is open"):
        engine.update_weights(hf_tensors(model))


def test_a_broken_update_is_given_up_by_the_next_one(served: tuple[SGLangEngine, Any]) -> None:
    engine, model = served
    engine.begin_weight_update()
    with pytest.raises(ValueError, match="2 payloads for an engine of 1 ranks"):
        engine.update_weights([("model.norm.weight", [torch.ones(64), torch.ones(64)])], load_format=LOADER)
    with pytest.raises(EngineError, match="failed or was not finished"):
        engine.generate(requests(PROMPTS), SAMPLING)
    with pytest.raises(EngineError, match="no weight update is open"):
        engine.end_weight_update(version=5)
    publish(engine, model, version=6)
    assert engine.generate(requests(PROMPTS), SAMPLING)[0].weight_versions[0] == 6


def test_a_registered_loader_gets_the_payload_of_its_rank(served: tuple[SGLangEngine, Any]) -> None:
    engine, model = served
    engine.begin_weight_update()
    change = torch.linspace(0, 1, 64)
    engine.update_weights([("model.norm.weight", [change])], load_format=LOADER)
    engine.end_weight_update(version=8)
    with torch.no_grad():
        model.model.norm.weight.add_(change)
    for prompt, sample in zip(PROMPTS, engine.generate(requests(PROMPTS), SAMPLING), strict=True):
        assert sample.logprobs == pytest.approx(logprobs_of(model, prompt, sample), abs=1e-5)


def test_a_loader_that_was_not_registered_is_named(served: tuple[SGLangEngine, Any]) -> None:
    engine, _ = served
    engine.begin_weight_update()
    with pytest.raises(ValueError, match=r"'other.loader' was not registered at start; registered: engine_test_loader"):
        engine.update_weights([], load_format="other.loader")
    engine.end_weight_update(version=9)


def test_a_prompt_that_cannot_fit_is_named(served: tuple[SGLangEngine, Any]) -> None:
    engine, _ = served
    long = GenerationRequest(prompt_id=41, index=0, token_ids=(5,) * 60, seed=0)
    with pytest.raises(ValueError, match="prompt 41: 60 prompt tokens \\+ 12 new tokens do not fit .* 64 in all"):
        engine.generate([long], SAMPLING)


def test_a_longest_prompt_fits(served: tuple[SGLangEngine, Any]) -> None:
    engine, _ = served
    longest = GenerationRequest(prompt_id=0, index=0, token_ids=(5,) * 52, seed=0)
    assert len(engine.generate([longest], SAMPLING)) == 1


def test_a_wrong_key_is_refused_and_the_key_is_nowhere_to_be_seen(served: tuple[SGLangEngine, Any]) -> None:
    engine, _ = served
    server = engine._server
    request = urllib.request.Request(
        f"{server.url}/get_model_info", headers={"Authorization": "Bearer " + "x" * len(server.api_key)}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 401
    assert server.api_key not in server.log_path.read_text()
    for pid in processes_of_group(server.pid):
        assert server.api_key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert server.api_key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_model_directory_without_a_config_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model.path: .* has no config.json"):
        make_engine(tmp_path, tmp_path / "engine.log")


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(
    served: tuple[SGLangEngine, Any], model_dir: Path, loader_path: None, tmp_path: Path
) -> None:
    one, _ = served
    other = tiny_model(seed=2)
    publish(one, other, version=2)
    config = RolloutConfig(startup_timeout_s=180.0, tensor=2)
    two = make_engine(model_dir, tmp_path / "two.log", config=config, custom_weight_loaders=(LOADER,))
    try:
        publish(two, other, version=2)
        expected = one.generate(requests(PROMPTS * 8), SAMPLING)
        found = two.generate(requests(PROMPTS * 8), SAMPLING)
        assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]
        for left, right in zip(found, expected, strict=True):
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)
        two.begin_weight_update()
        # gate_up_proj of a rank is the rank's half of gate above its half of up: each rank gets a change of its own.
        change = torch.arange(2 * 128 * 64, dtype=torch.float32).view(2, 128, 64) / 1e5
        two.update_weights([("model.layers.0.mlp.gate_up_proj.weight", [change[0], change[1]])], load_format=LOADER)
        two.end_weight_update(version=3)
        with torch.no_grad():
            mlp = other.model.layers[0].mlp
            mlp.gate_proj.weight.add_(torch.cat([change[0, :64], change[1, :64]]))
            mlp.up_proj.weight.add_(torch.cat([change[0, 64:], change[1, 64:]]))
        for prompt, sample in zip(PROMPTS, two.generate(requests(PROMPTS), SAMPLING), strict=True):
            assert sample.logprobs == pytest.approx(logprobs_of(other, prompt, sample), abs=1e-5)
    finally:
        group = two._server.pid
        two.shutdown()
        assert wait_until_gone(group) == []
