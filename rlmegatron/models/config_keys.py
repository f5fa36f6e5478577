"""A config.json whose keys are all accounted for: read by a family, known to change no number, or an error.

In: the parsed file. Out: checked values; at the end `refuse_the_rest` names every key that nobody has read. Pure; must
never import torch, megatron or transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Keys that change no number of a forward pass: names, token ids, how a model was initialised, what a training run of
# somebody else used, and the generation defaults that older versions of transformers wrote into every config.json.
_HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures auto_map
    aux_loss_alpha bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id ep_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_llama_config label2id
    length_penalty max_length max_window_layers min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id
    prefix pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    router_aux_loss_coef sep_token_id seq_aux seq_length suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version
    typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 - a list of them would be two pages long
)


class ConfigKeys:
    """One config.json; every method that returns a key's value marks the key as read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._config

    def optional(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where it is absent or null."""
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.optional(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"config.json: {key} must be a whole number above 0, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 0."""
        value = self.optional(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"config.json: {key} must be a whole number from 0, got {value!r}")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.optional(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"config.json: {key} must be a number above 0, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.optional(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any other value than `allowed`, absence or null: it would change the numbers and is not built."""
        value = self.optional(key, allowed[0])
        if value not in allowed:
            shown = " or ".join(repr(one) for one in allowed)
            raise ValueError(f"config.json: {key} = {value!r} is not supported; supported: {shown}")

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that mean nothing beside the values of others."""
        self._read.update(keys)

    def refuse_the_rest(self) -> None:
        """ValueError names every key that was neither read nor is known to change nothing (null changes nothing)."""
        left = sorted(
            key for key, value in self._config.items() if value is not None and key not in self._read | _HARMLESS
        )
        if left:
            shown = ", ".join(f"{key} = {self._config[key]!r}"[:120] for key in left)
            raise ValueError(
                f"config.json: not understood: {shown}. Such a key may change the model's numbers; remove it from "
                "config.json if it does not"
            )
