"""The families: a Hugging Face architecture name to the function that reads its config. A new family is one line here.

In: a model directory. Out: its `Architecture`. Must never import torch or megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.families import deepseek_v2, deepseek_v3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from rlmegatron.models.model_files import CONFIG_FILE, holds_megatron_checkpoint, read_object
from rlmegatron.models.quantization import read_quantization
from rlmegatron.models.reward_model import as_reward_model, language_model_of

FAMILIES: Mapping[str, Callable[[ConfigKeys], Architecture]] = {
    "LlamaForCausalLM": llama.read,
    "MistralForCausalLM": mistral.read,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
    "MixtralForCausalLM": mixtral.read,
    "DeepseekV2ForCausalLM": deepseek_v2.read,
    "DeepseekV3ForCausalLM": deepseek_v3.read,
}


def read_architecture(directory: str, *, for_critic: bool = False) -> Architecture:
    """Read config.json of `directory`; ValueError names the file and what is not understood.

    for_critic: a reward model will do, which has a value head and no output layer.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        arch = architecture_of(read_config(directory), for_critic=for_critic)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{directory}/{text}") from None
    if arch.value_head and holds_megatron_checkpoint(directory):
        raise ValueError(
            f"{directory} holds a reward model ({arch.name}) as a Megatron checkpoint, which is not supported; use its "
            "Hugging Face directory"
        )
    return arch


def read_config(directory: str) -> dict[str, Any]:
    """The parsed config.json of `directory`; ValueError where there is none."""
    path = Path(directory) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; {directory} must be a Hugging Face directory")
    return read_object(path)


def architecture_of(config: Mapping[str, Any], *, for_critic: bool = False) -> Architecture:
    """The architecture that a parsed config.json describes; every key of it is accounted for.

    Without `for_critic` a reward model is refused, which cannot answer.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ValueError(
            f"config.json: architectures is {names!r}; it must be a list of one name, as ['Qwen3ForCausalLM']"
        )
    name = language_model_of(names[0])
    if name not in FAMILIES:
        raise ValueError(f"config.json: architecture {names[0]} is not supported; supported: {', '.join(FAMILIES)}")
    is_reward_model = name != names[0]
    if is_reward_model and not for_critic:
        raise ValueError(
            f"config.json: {names[0]} is a reward model: it scores answers and cannot give any. It may be critic.path; "
            f"use a {name} here"
        )
    keys = ConfigKeys(config)
    block = read_quantization(keys)
    arch = FAMILIES[name](keys)
    if is_reward_model:
        arch = as_reward_model(arch, keys)
    keys.refuse_the_rest()
    removed = (("quantization_config", None),) if block else ()
    return replace(arch, fp8_block=block, exported_keys=(*arch.exported_keys, *removed))
