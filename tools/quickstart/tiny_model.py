"""The quickstart's model and tokenizer: a Qwen3 of about a million parameters over an alphabet of digits and `=`.

In: nothing but constants. Out: Hugging Face objects to save. Must never import the task or rlmegatron.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

VOCABULARY = ("<pad>", "<bos>", "<eos>", *"0123456789=")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
MAX_LENGTH = 512

# The template carries the BOS, as those of larger models do: a rendered chat is then encoded without special tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; encoding plain text prepends BOS; a character outside the alphabet is an error."""
    core = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def model_config() -> Qwen3Config:
    """Four layers of width 128 with grouped-query attention and tied embeddings: 986,240 parameters."""
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def generation_config() -> GenerationConfig:
    """Sample from the whole distribution until EOS."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID
    )
