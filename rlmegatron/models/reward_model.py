"""Reward models: a family's body with one score for every position where a language model has its output layer.

In: what config.json says of its classes. Out: an `Architecture` with a value head, from which a critic can start. Pure;
must never import torch or megatron.
"""

from __future__ import annotations

from dataclasses import replace

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.config_keys import ConfigKeys

_CLASSIFIER, _LANGUAGE_MODEL = "ForSequenceClassification", "ForCausalLM"


def language_model_of(name: str) -> str:
    """The architecture that a reward model's body is taken from; any other name stays as it is.

    >>> language_model_of("Qwen3ForSequenceClassification")
    'Qwen3ForCausalLM'
    """
    return name.removesuffix(_CLASSIFIER) + _LANGUAGE_MODEL if name.endswith(_CLASSIFIER) else name


def as_reward_model(arch: Architecture, keys: ConfigKeys) -> Architecture:
    """The same body with a value head; ValueError unless the classifier has one class, whose logit is the score.

    transformers writes `id2label` with an entry for each class, and leaves it out where there are 2.
    """
    labels, number = keys.optional("id2label"), keys.optional("num_labels")
    counts = [count for count in (len(labels) if isinstance(labels, dict) else labels, number) if count is not None]
    if not counts or any(count != 1 for count in counts):
        raise ValueError(
            f"config.json: {arch.name} with id2label = {str(labels)[:100]}, num_labels = {number}: a reward model has "
            "one label, whose logit is its score; id2label must have one entry (without any, there are two labels)"
        )
    return replace(arch, value_head=True, tied_embeddings=False)
