"""A tiny tokenizer, built in memory, with every way to treat BOS."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<unk>"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz0123456789=+ \n")
TEMPLATE = (
    "{{ bos }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant', 'system'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

MakeTokenizer = Callable[..., Any]


@pytest.fixture
def make_tokenizer() -> MakeTokenizer:
    """One letter is one token; adds_bos and adds_eos are put around plain text, template_bos is in the template."""

    def make(
        *, adds_bos: bool = False, adds_eos: bool = False, template: bool = True, template_bos: bool = False
    ) -> Any:
        vocabulary = {token: index for index, token in enumerate(SPECIAL + LETTERS)}
        backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = Split("", "isolated")
        if adds_bos or adds_eos:
            single = " ".join(["<s>"] * adds_bos + ["$A"] + ["</s>"] * adds_eos)
            backend.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
        tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            unk_token="<unk>",
            additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        )
        tokenizer.chat_template = TEMPLATE.replace("{{ bos }}", "<s>" if template_bos else "") if template else None
        return tokenizer

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a file in the test's directory and returns its path."""

    def write(rows: list[dict[str, Any]], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
