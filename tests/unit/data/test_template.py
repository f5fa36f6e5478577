"""Prompts as tokens: the template's text, and exactly one BOS however it comes about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlmegatron.data.template import PromptEncoder, opening_tokens

BOS, EOS, USER, ASSISTANT, SYSTEM, A, B = 1, 2, 3, 4, 5, 7, 8
MESSAGES = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


def encode(tokenizer: Any, prompt: Any, *, chat_template: bool) -> tuple[int, ...]:
    (encoded,) = PromptEncoder(tokenizer, chat_template=chat_template).encode([prompt], where=["f line 1"])
    return encoded.token_ids


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template_bos", [False, True])
def test_a_templated_prompt_has_one_bos_if_template_or_tokenizer_asks_for_it(
    make_tokenizer: Callable[..., Any], adds_bos: bool, template_bos: bool
) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos, template_bos=template_bos)
    opening = (BOS,) if adds_bos or template_bos else ()
    assert encode(tokenizer, MESSAGES, chat_template=True) == (*opening, SYSTEM, A, USER, B, ASSISTANT)
    assert encode(tokenizer, "a", chat_template=True) == (*opening, USER, A, ASSISTANT)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_plain_prompt_is_encoded_as_it_is(make_tokenizer: Callable[..., Any], adds_bos: bool) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos, template=False)
    opening = (BOS,) if adds_bos else ()
    assert encode(tokenizer, "ab", chat_template=False) == (*opening, A, B)
    assert encode(tokenizer, "<s>ab", chat_template=False) == (BOS, A, B)
    assert encode(tokenizer, "<s><s>ab", chat_template=False) == (BOS, A, B)
    assert encode(tokenizer, "ab<s>", chat_template=False) == (*opening, A, B, BOS)


def test_templated_tokens_equal_transformers_own(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(adds_bos=True, template_bos=True)
    theirs = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert encode(tokenizer, MESSAGES, chat_template=True) == tuple(theirs)


def test_an_eos_that_the_tokenizer_puts_behind_text_never_ends_a_prompt(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(adds_bos=True, adds_eos=True)
    assert tokenizer("a")["input_ids"] == [BOS, A, EOS]
    assert opening_tokens(tokenizer) == (BOS,)
    assert encode(tokenizer, "a", chat_template=False) == (BOS, A)


def test_the_text_is_what_the_template_renders(make_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(make_tokenizer(), chat_template=True)
    texts = [one.text for one in encoder.encode([MESSAGES, "a"], where=["f line 1", "f line 2"])]
    assert texts == ["<|system|>a<|user|>b<|assistant|>", "<|user|>a<|assistant|>"]
    assert encoder.encode([], where=[]) == []


def test_a_tokenizer_without_a_template_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"the tokenizer has no chat template; .* text, set data.chat_template: false"):
        PromptEncoder(make_tokenizer(template=False), chat_template=True)


def test_messages_without_a_template_are_refused(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="f line 1: .* chat messages, which need data.chat_template: true"):
        encode(make_tokenizer(), MESSAGES, chat_template=False)


def test_a_prompt_that_the_template_rejects_is_named(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"f line 1: the chat template rejects .*\(roles tool\): unknown role tool"):
        encode(make_tokenizer(), [{"role": "tool", "content": "x"}], chat_template=True)


def test_an_empty_prompt_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="f line 1: the prompt is empty"):
        encode(make_tokenizer(), "", chat_template=False)
    assert encode(make_tokenizer(adds_bos=True), "", chat_template=False) == (BOS,)
