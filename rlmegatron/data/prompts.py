"""The stream of training prompts: weighted files, a seeded order per epoch, over-long prompts dropped, resumable.

In: the data section, a tokenizer and the run's seed. Out: `Prompt`s and a small cursor. Must never import torch; the
lead rank alone builds and draws from a stream.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmegatron.config.schema import DataConfig
from rlmegatron.data.source import Rows, open_rows, prompt_of
from rlmegatron.data.template import EncodedPrompt, PromptEncoder, Tokenizer
from rlmegatron.types import Prompt

CURSOR_FORMAT = 1
_ENCODE_ROWS = 1024


@dataclass(slots=True)
class _File:
    """One file of the stream and how far it was drawn."""

    rows: Rows
    weight: float
    kept: array[int]
    """Indices of the rows whose prompt is short enough."""
    num_drawn: int = 0
    epoch: int = -1
    order: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """Order of `kept` in `epoch`; None before the first draw."""

    def identity(self) -> dict[str, Any]:
        """What a resumed run must find unchanged for the draws to go on as they would have."""
        return {
            "num_bytes": self.rows.fingerprint.num_bytes,
            "sha256": self.rows.fingerprint.sha256,
            "kept": hashlib.sha256(self.kept.tobytes()).hexdigest(),
            "num_kept": len(self.kept),
            "weight": self.weight,
        }


class PromptStream:
    """An endless stream of prompts.

    Every file is read, rendered and tokenised once at construction (0.1 to 0.2 ms a row), so that a broken row or a
    bound that is too small is an error before anything else starts; afterwards only drawn rows are tokenised. The n-th
    draw takes the file that is furthest behind its share of n draws, and from it the next row of the order that (seed,
    file position, epoch) decide. Prompt ids count the draws, so a row drawn twice is two prompts.

    max_prompt_tokens: longest prompt, BOS and template included; longer ones are left out, see `notices`.
    Raises ValueError for a file that cannot be read, a row without a valid prompt, and a file with no prompt left.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, seed: int, max_prompt_tokens: int) -> None:
        self._config = config
        self._seed = seed
        self._encoder = PromptEncoder(tokenizer, chat_template=config.chat_template)
        self._num_drawn = 0
        self._notices: list[str] = []
        self._files = [
            self._open(source.path, source.weight, max_prompt_tokens=max_prompt_tokens) for source in config.train
        ]

    @property
    def notices(self) -> tuple[str, ...]:
        """One line per file that lost prompts: how many of how many, and why; empty if none did."""
        return tuple(self._notices)

    @property
    def num_prompts(self) -> int:
        """Prompts of one epoch over all files."""
        return sum(len(file.kept) for file in self._files)

    def take(self, num: int) -> list[Prompt]:
        """The next `num` prompts; more than an epoch holds is allowed."""
        picks = [self._draw() for _ in range(num)]
        rows = [file.rows[index] for file, index in picks]
        places = [file.rows.where(index) for file, index in picks]
        first_id = self._num_drawn - num
        return _encode(self._encoder, rows, places, prompt_key=self._config.prompt_key, first_id=first_id)

    def state(self) -> dict[str, Any]:
        """The cursor: plain JSON values, a few hundred bytes per file."""
        return {
            "format": CURSOR_FORMAT,
            "seed": self._seed,
            "shuffle": self._config.shuffle,
            "num_drawn": self._num_drawn,
            "files": [{"path": file.rows.path, "num_drawn": file.num_drawn, **file.identity()} for file in self._files],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken.

        Raises ValueError that names what changed: the seed, shuffling, the number of files, or a file's content, weight
        or set of prompts that are short enough. A file may have moved.
        """
        if state["format"] != CURSOR_FORMAT:
            raise ValueError(f"data cursor: format {state['format']} is not allowed, must be {CURSOR_FORMAT}")
        for name, now in (("seed", self._seed), ("shuffle", self._config.shuffle)):
            if state[name] != now:
                raise ValueError(f"data cursor: {name} was {state[name]} and is now {now}; the order would change")
        if len(state["files"]) != len(self._files):
            before = ", ".join(saved["path"] for saved in state["files"])
            raise ValueError(
                f"data cursor: data.train had {len(state['files'])} files ({before}), not {len(self._files)}"
            )
        for file, saved in zip(self._files, state["files"], strict=True):
            _check_unchanged(file, saved)
        for file, saved in zip(self._files, state["files"], strict=True):
            file.num_drawn = saved["num_drawn"]
        self._num_drawn = state["num_drawn"]

    def _open(self, path: str, weight: float, *, max_prompt_tokens: int) -> _File:
        rows = open_rows(path)
        lengths = [len(one.token_ids) for one in _encode_all(self._encoder, rows, prompt_key=self._config.prompt_key)]
        kept = array("q", [index for index, length in enumerate(lengths) if length <= max_prompt_tokens])
        if not kept:
            raise ValueError(
                f"{path}: all {len(rows)} prompts are longer than {max_prompt_tokens} tokens (the shortest has "
                f"{min(lengths)}); raise data.max_prompt_tokens"
            )
        num_dropped = len(rows) - len(kept)
        if num_dropped:
            self._notices.append(
                f"{path}: dropped {num_dropped} of {len(rows)} prompts, longer than {max_prompt_tokens} tokens "
                f"(the longest has {max(lengths)})"
            )
        return _File(rows, weight, kept)

    def _draw(self) -> tuple[_File, int]:
        """The file furthest behind its share, and the index of its next row."""
        total = sum(file.weight for file in self._files)
        behind = [file.weight / total * (self._num_drawn + 1) - file.num_drawn for file in self._files]
        position = behind.index(max(behind))
        file = self._files[position]
        epoch, offset = divmod(file.num_drawn, len(file.kept))
        if file.order is None or file.epoch != epoch:
            file.epoch, file.order = epoch, self._order(len(file.kept), position=position, epoch=epoch)
        file.num_drawn += 1
        self._num_drawn += 1
        return file, file.kept[int(file.order[offset])]

    def _order(self, num_rows: int, *, position: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self._config.shuffle:
            return np.arange(num_rows)
        # Sorted raw bits, because numpy keeps bit generators stable across versions, but not Generator.permutation.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, position, epoch])).random_raw(num_rows)
        return np.argsort(bits, kind="stable")


def read_all(
    path: str, tokenizer: Tokenizer, config: DataConfig, *, max_prompt_tokens: int, first_id: int = 0
) -> list[Prompt]:
    """Every prompt of a file in its order, with ids from `first_id`; the reader of evaluation sets.

    Raises ValueError for a file or row that `PromptStream` would not read, and for a prompt longer than
    max_prompt_tokens: an evaluation that silently leaves out prompts would not be comparable.
    """
    rows = open_rows(path)
    places = [rows.where(index) for index in range(len(rows))]
    encoder = PromptEncoder(tokenizer, chat_template=config.chat_template)
    everything = [rows[index] for index in range(len(rows))]
    prompts = _encode(encoder, everything, places, prompt_key=config.prompt_key, first_id=first_id)
    for prompt in prompts:
        if len(prompt.token_ids) > max_prompt_tokens:
            raise ValueError(
                f"{prompt.source}: the prompt has {len(prompt.token_ids)} tokens, allowed are {max_prompt_tokens}; "
                f"every prompt of an evaluation set counts: shorten it or raise data.max_prompt_tokens"
            )
    return prompts


def _encode(
    encoder: PromptEncoder, rows: list[dict[str, Any]], places: list[str], *, prompt_key: str, first_id: int
) -> list[Prompt]:
    prompts = [prompt_of(row, key=prompt_key, where=place) for row, place in zip(rows, places, strict=True)]
    encoded = encoder.encode(prompts, where=places)
    return [
        Prompt(id=first_id + number, token_ids=one.token_ids, text=one.text, row=row, source=place)
        for number, (one, row, place) in enumerate(zip(encoded, rows, places, strict=True))
    ]


def _encode_all(encoder: PromptEncoder, rows: Rows, *, prompt_key: str) -> Iterator[EncodedPrompt]:
    """Every prompt of a file, in blocks that a fast tokenizer encodes in parallel."""
    for start in range(0, len(rows), _ENCODE_ROWS):
        block = range(start, min(start + _ENCODE_ROWS, len(rows)))
        places = [rows.where(index) for index in block]
        prompts = [prompt_of(rows[i], key=prompt_key, where=place) for i, place in zip(block, places, strict=True)]
        yield from encoder.encode(prompts, where=places)


def _check_unchanged(file: _File, saved: Mapping[str, Any]) -> None:
    path, now = file.rows.path, file.identity()
    if (saved["num_bytes"], saved["sha256"]) != (now["num_bytes"], now["sha256"]):
        raise ValueError(
            f"{path}: the file has changed since the checkpoint ({saved['num_bytes']} bytes then, {now['num_bytes']} "
            f"now, sha256 {saved['sha256'][:12]} then, {now['sha256'][:12]} now); restore it, or start a new run"
        )
    if saved["kept"] != now["kept"]:
        raise ValueError(
            f"{path}: {saved['num_kept']} prompts were short enough before the checkpoint, other {now['num_kept']} "
            f"are now; data.max_prompt_tokens, data.chat_template, data.prompt_key or the tokenizer has changed"
        )
    if saved["weight"] != now["weight"]:
        raise ValueError(f"{path}: its weight was {saved['weight']:g} before the checkpoint, now {now['weight']:g}")
