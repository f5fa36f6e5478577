"""From a prompt (string or chat messages) to token ids, with the tokenizer's template and exactly one BOS.

In: prompts and a transformers tokenizer. Out: text and token ids. Must never import torch or transformers: the
tokenizer is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]


class Tokenizer(Protocol):
    """What is used of transformers' PreTrainedTokenizerBase."""

    bos_token_id: int | None
    chat_template: Any
    all_special_ids: list[int]

    def __len__(self) -> int: ...

    def decode(self, token_ids: Any) -> str: ...

    def __call__(self, text: Any, *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the model reads it; `text` has the template but not a BOS that only the tokenizer adds."""

    text: str
    token_ids: tuple[int, ...]


class PromptEncoder:
    """Encodes prompts with one tokenizer.

    With `chat_template`, messages (a string is one user turn) are rendered with the tokenizer's template and the header
    of the assistant's turn; without, strings are encoded as they are. The tokens that the tokenizer puts before plain
    text (BOS, for most that have one) open every prompt exactly once, whether the template, the text or only the
    tokenizer has them. What it puts behind plain text (an EOS) is never added. Raises ValueError if the tokenizer has
    no template and one is asked for.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat_template: bool) -> None:
        if chat_template and not tokenizer.chat_template:
            raise ValueError(
                "data.chat_template is on, but the tokenizer has no chat template; add one to its directory "
                "(chat_template.jinja or tokenizer_config.json), or, for prompts that are text, set "
                "data.chat_template: false"
            )
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._opening = opening_tokens(tokenizer)

    def encode(self, prompts: Sequence[str | list[Message]], *, where: Sequence[str]) -> list[EncodedPrompt]:
        """Text and tokens of each prompt; `where[i]` opens the error message about prompt i. Raises ValueError."""
        texts = [self._render(prompt, where=place) for prompt, place in zip(prompts, where, strict=True)]
        if not texts:
            return []
        rows = self._tokenize(texts, where=where)
        encoded = [EncodedPrompt(text, self._opened(row)) for text, row in zip(texts, rows, strict=True)]
        for prompt, place in zip(encoded, where, strict=True):
            if not prompt.token_ids:
                raise ValueError(f"{place}: the prompt is empty (it has no tokens)")
        return encoded

    def _tokenize(self, texts: Sequence[str], *, where: Sequence[str]) -> list[list[int]]:
        try:
            return list(self._tokenizer(list(texts), add_special_tokens=False)["input_ids"])
        except Exception as error:  # a tokenizer without an unknown token raises whatever its backend has
            if len(texts) == 1:
                raise ValueError(f"{where[0]}: the tokenizer cannot encode this prompt: {error}") from error
        return [self._tokenize([text], where=[place])[0] for text, place in zip(texts, where, strict=True)]

    def _render(self, prompt: str | list[Message], *, where: str) -> str:
        if not self._chat_template:
            return only_text(prompt, where=where)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja errors of any kind, and what templates raise themselves
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"{where}: the chat template rejects this prompt (roles {roles}): {error}") from error
        assert isinstance(text, str), f"apply_chat_template(tokenize=False) returned {type(text).__name__}"
        return text

    def _opened(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens after exactly one opening."""
        rest, opening, bos = tuple(token_ids), self._opening, self._tokenizer.bos_token_id
        while opening and rest[: len(opening)] == opening:
            rest = rest[len(opening) :]
        while not opening and bos is not None and rest[:2] == (bos, bos):
            rest = rest[1:]
        return opening + rest


def only_text(prompt: str | list[Message], *, where: str) -> str:
    """A prompt that is encoded without a chat template; raises ValueError for messages, opened with `where`."""
    if not isinstance(prompt, str):
        raise ValueError(f"{where}: the prompt is a list of chat messages, which need data.chat_template: true")
    return prompt


def opening_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before plain text: (BOS,), none, or for some models more than one."""
    probe = _plain_text(tokenizer)
    bare = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
    full = list(tokenizer(probe, add_special_tokens=True)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    raise ValueError(f"the tokenizer encodes {probe!r} as {bare}, but with special tokens as {full}")


def _plain_text(tokenizer: Tokenizer) -> str:
    """A text that this tokenizer can encode, however small its vocabulary: its first token that is not special."""
    special = set(tokenizer.all_special_ids)
    ordinary = (token_id for token_id in range(len(tokenizer)) if token_id not in special)
    texts = (tokenizer.decode([token_id]) for token_id in ordinary)
    return next((text for text in texts if text.strip() and text.isprintable()), "a")
