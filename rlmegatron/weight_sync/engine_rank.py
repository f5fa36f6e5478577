"""How SGLang cuts a size over the ranks of an engine, and what it pads there.

In: sizes of a model, an engine's (TP size, EP size, rank) and whether it runs on a CPU, where SGLang pads what does not
come out even; on a GPU it refuses that. Out: shares. Pure; must never import torch or sglang.
"""

from __future__ import annotations

from dataclasses import dataclass

_VOCAB_MULTIPLE = 64  # sglang/srt/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE
_CPU_FFN_MULTIPLE = 32  # sglang/srt/configs/update_config.py, DEFAULT_MOE_PADDING_SIZE


@dataclass(frozen=True, slots=True)
class Share:
    """[start, stop) of a tensor's dimension fills the first of `room` places; the others are padding."""

    start: int
    stop: int
    room: int

    def times(self, size: int) -> Share:
        """The same share of units of `size`, as of heads."""
        return Share(self.start * size, self.stop * size, self.room * size)


@dataclass(frozen=True, slots=True)
class EngineRank:
    """One rank of an engine of `tp` ranks.

    Experts are spread over `ep` parts, each of tp / ep neighbouring ranks that share every expert of the part
    (sglang/srt/runtime_context.py, derive_spawn_ranks).
    """

    tp: int
    rank: int
    on_cpu: bool
    ep: int = 1

    def __post_init__(self) -> None:
        assert self.tp % self.ep == 0, f"an engine of {self.tp} ranks cannot spread experts over {self.ep} parts"

    def share(self, size: int, *, padded: int | None = None) -> Share:
        """An equal share of `size`, or of `padded` places of which the last are empty."""
        return _equal_share(size, padded or size, ranks=self.tp, rank=self.rank)

    def vocabulary(self, size: int) -> Share:
        """Rows of the embedding or the head."""
        multiple = _VOCAB_MULTIPLE
        if _round_up(size, multiple) % self.tp:
            multiple *= self.tp
        return self.share(size, padded=_round_up(size, multiple))

    def ffn(self, size: int, *, experts: int = 1) -> Share:
        """Inner rows of a gated MLP that has the size of `experts` equal ones together."""
        return self.share(size, padded=self._padded_ffn(size // experts) * experts)

    def experts(self, num: int) -> range:
        """The numbers of the experts of which this rank holds a share."""
        assert num % self.ep == 0, f"{num} experts cannot be spread over {self.ep} parts"
        first = self.rank // self._sharers * (num // self.ep)
        return range(first, first + num // self.ep)

    def expert_ffn(self, size: int) -> Share:
        """Inner rows of one of those experts."""
        return _equal_share(size, self._padded_ffn(size), ranks=self._sharers, rank=self.rank % self._sharers)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Share, Share]:
        """Query heads and KV heads, counted in heads."""
        if self.on_cpu:
            kv = _round_up(num_kv_heads, self.tp)
            return self.share(num_heads, padded=kv * (num_heads // num_kv_heads)), self.share(num_kv_heads, padded=kv)
        if num_kv_heads < self.tp:  # tp / num_kv_heads neighbours hold the same head
            head = self.rank * num_kv_heads // self.tp
            return self.share(num_heads), Share(head, head + 1, 1)
        return self.share(num_heads), self.share(num_kv_heads)

    @property
    def _sharers(self) -> int:
        return self.tp // self.ep

    def _padded_ffn(self, size: int) -> int:
        return _round_up(size, _CPU_FFN_MULTIPLE * self.tp) if self.on_cpu else size


def _equal_share(size: int, padded: int, *, ranks: int, rank: int) -> Share:
    room = padded // ranks
    start = min(rank * room, size)
    return Share(start, min(start + room, size), room)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
