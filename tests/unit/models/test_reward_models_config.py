"""Reward models as config.json and files describe them: a body, one score, and no use to a policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_families import FAMILIES, random_tensors, tiny_config

from rlmegatron.models.card import read_model_card
from rlmegatron.models.decoder_rules import EMBEDDING, HEAD, VALUE_HEAD
from rlmegatron.models.load import hold_to
from rlmegatron.models.table import architecture_of, read_architecture
from rlmegatron.platform.torchvision_ops import install_torchvision_hook

ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
QWEN3 = "Qwen3ForSequenceClassification"


def reward_config(family: str, **changes: Any) -> dict[str, Any]:
    """`family` as a reward model."""
    name = family.replace("CausalLM", "SequenceClassification")
    return {**tiny_config(family), "architectures": [name], **ONE_LABEL, **changes}


def tensor_names(config: dict[str, Any], **kind: Any) -> set[str]:
    rules = architecture_of(config, **kind).parameter_rules(2)
    return {part.name for rule in rules for part in rule.parts}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_has_the_tensors_of_its_family_and_a_score_in_place_of_the_head(family: str) -> None:
    """Whether its family ties the embeddings or not: there is no head that they could be tied to."""
    untied = {**tiny_config(family), "tie_word_embeddings": False}
    expected = tensor_names(untied) - {HEAD} | {VALUE_HEAD}
    for tied in (True, False):
        assert tensor_names(reward_config(family, tie_word_embeddings=tied), for_critic=True) == expected
    arch = architecture_of(reward_config(family), for_critic=True)
    (rule,) = [rule for rule in arch.parameter_rules(2) if rule.path == "value_head.weight"]
    assert (rule.local_shape(2), rule.copy, rule.layer) == ((1, arch.hidden_size), False, None)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3Moe", "Mixtral"])
def test_transformers_names_the_tensors_of_a_reward_model_so(family: str) -> None:
    """But for experts, which transformers 5 holds stacked and writes one by one."""
    install_torchvision_hook()
    import transformers

    config = reward_config(f"{family}ForCausalLM")
    settings = getattr(transformers, f"{family}Config")(**config)
    with torch.device("meta"):
        built = transformers.AutoModelForSequenceClassification.from_config(settings).state_dict()
    ours = {
        part.name: part.shape
        for rule in architecture_of(config, for_critic=True).parameter_rules(1)
        for part in rule.parts
    }
    plain = {name: tuple(tensor.shape) for name, tensor in built.items() if ".mlp.experts." not in name}
    found = {name: shape for name, shape in ours.items() if ".experts." not in name}
    if family == "Mixtral":  # transformers 5 renames the block in memory
        plain = {name.replace(".mlp.", ".block_sparse_moe."): shape for name, shape in plain.items()}
    assert found == plain


@pytest.mark.parametrize(
    "labels",
    [
        {"id2label": None},
        {"id2label": {"0": "bad", "1": "good"}},
        {"id2label": None, "num_labels": 2},
        {"num_labels": 3},
        {"id2label": ["LABEL_0"]},
    ],
    ids=str,
)
def test_a_classifier_of_other_than_one_label_is_refused(labels: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: Qwen3ForSequenceClassification with id2label = .*one label"):
        architecture_of(reward_config("Qwen3ForCausalLM", **labels), for_critic=True)


def test_one_label_may_be_given_by_its_number() -> None:
    config = reward_config("Qwen3ForCausalLM", id2label=None, num_labels=1)
    assert architecture_of(config, for_critic=True).value_head


def test_a_key_that_is_not_understood_is_refused_in_a_reward_model_too() -> None:
    with pytest.raises(ValueError, match="not understood: mean = 0.5, std = 2.0"):
        architecture_of(reward_config("Qwen3ForCausalLM", mean=0.5, std=2.0), for_critic=True)
    with pytest.raises(ValueError, match="architecture FooForSequenceClassification is not supported"):
        architecture_of({**tiny_config("Qwen3ForCausalLM"), "architectures": ["FooForSequenceClassification"]})


def test_only_a_critic_can_start_from_a_reward_model(make_model: Callable[..., Path]) -> None:
    directory = make_model(architectures=[QWEN3], **ONE_LABEL)
    says = (
        f"{directory}/config.json: {QWEN3} is a reward model: it scores answers and cannot give any. It may be "
        "critic.path; use a Qwen3ForCausalLM here"
    )
    for read in (read_architecture, read_model_card):
        with pytest.raises(ValueError) as raised:
            read(str(directory))
        assert str(raised.value).removeprefix("model.path: ") == says
    card = read_model_card(str(directory), key="critic.path", for_critic=True)
    policy = read_model_card(str(make_model("policy")))
    assert (card.architecture, card.num_parameters) == (QWEN3, policy.num_parameters)


def test_a_reward_model_as_a_megatron_checkpoint_is_refused(make_model: Callable[..., Path]) -> None:
    directory = make_model(architectures=[QWEN3], **ONE_LABEL)
    (directory / "model.safetensors").rename(directory / "__0_0.distcp")
    for name in (".metadata", "metadata.json", "common.pt"):
        (directory / name).touch()
    expected = rf"^critic.path: {directory} holds a reward model \({QWEN3}\) as a Megatron checkpoint"
    with pytest.raises(ValueError, match=expected):
        read_model_card(str(directory), key="critic.path", for_critic=True)


def test_every_tensor_of_a_reward_model_is_accounted_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(reward_config("Qwen3ForCausalLM", tie_word_embeddings=True)))
    arch = read_architecture(str(tmp_path), for_critic=True)
    tensors = random_tensors(arch)
    assert tensors[VALUE_HEAD].shape == (1, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert hold_to(arch, tmp_path) == []
    for name, tensor in (
        (HEAD, tensors[EMBEDDING].clone()),
        ("score.bias", torch.zeros(1)),
        ("v_head.weight", torch.zeros(8)),
    ):
        save_file({**tensors, name: tensor}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"tensors that this model does not have: {name}"):
            hold_to(arch, tmp_path)
    save_file({**tensors, VALUE_HEAD: torch.zeros(2, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"score.weight has shape \[2, 8\], config.json says \[1, 8\]"):
        hold_to(arch, tmp_path)
    del tensors[VALUE_HEAD]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="the checkpoint has no tensor score.weight"):
        hold_to(arch, tmp_path)
