"""`TrainBatch`: the ragged batch of sequences (prompt and answer) that the learner trains on.

In: groups of judged samples, then per-token tensors by name. Out: selections of it as micro-batches. Must never import
torch.distributed, megatron or a tokenizer.

One convention for every per-token tensor: position i of a sequence is about token i. `logp[i]` is the log-probability
of token[i] given token[:i], `values[i]` the value of the state in which token[i] was chosen, `loss_mask[i]` whether
token[i] was sampled by the policy. On all other positions (prompts) the mask is False and every other tensor 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rlmegatron.types import RoutedExperts, SampleGroup

SCORES = ("old_logp", "ref_logp", "values", "advantages", "returns", "importance")
"""Per-token tensors that are added after a batch is assembled."""
_PER_TOKEN = ("tokens", "loss_mask", "rollout_logp")
_PER_SAMPLE = ("sample_ids", "group_ids", "rewards")
NO_ID = -1
"""Sample and group id of a dummy sequence."""
FREE = -1
"""In place of an expert: the learner's router chooses for this token."""


# N sequences, T tokens of all of them, laid end to end
@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Sequences laid end to end; sequence n is the tokens from cu_seqlens[n] up to cu_seqlens[n + 1]."""

    tokens: Tensor
    """[T] int64: prompt, then answer, of each sequence."""
    cu_seqlens: Tensor
    """[N+1] int32: where sequences start, and T."""
    loss_mask: Tensor
    """[T] bool: the tokens that the policy sampled."""
    rollout_logp: Tensor
    """[T] float32, nats: the engine's log-probability at the sampling temperature."""
    sample_ids: Tensor
    """[N] int64: number of the sample in the rollout batch."""
    group_ids: Tensor
    """[N] int64: id of the prompt; samples of one prompt share it, equal prompts drawn twice do not."""
    rewards: Tensor
    """[N] float32."""
    old_logp: Tensor | None = None
    """[T] float32, nats: the learner's log-probability before the update."""
    ref_logp: Tensor | None = None
    """[T] float32, nats: the reference model's log-probability."""
    values: Tensor | None = None
    """[T] float32: the critic's value before the update."""
    advantages: Tensor | None = None
    """[T] float32."""
    returns: Tensor | None = None
    """[T] float32: what the critic is fitted to."""
    importance: Tensor | None = None
    """[T] float32: what the policy loss of each token is multiplied by, for the engine sampled it, not the learner."""

    routed_experts: Tensor | None = None
    """[T, layers with experts, top_k] int16: the experts that the engine sent each token to, or FREE in every place."""

    def __post_init__(self) -> None:
        num_sequences, num_tokens = self.cu_seqlens.shape[0] - 1, self.tokens.shape[0]
        assert num_sequences >= 0, "cu_seqlens is empty; without sequences it is [0]"
        for name in _PER_SAMPLE:
            shape = tuple(getattr(self, name).shape)
            assert shape == (num_sequences,), f"{name} has shape {shape}, must be ({num_sequences},)"
        for name in (*_PER_TOKEN, *self.score_names):
            shape = tuple(getattr(self, name).shape)
            assert shape == (num_tokens,), f"{name} has shape {shape}, must be ({num_tokens},)"
        if self.routed_experts is not None:
            shape = tuple(self.routed_experts.shape)
            assert len(shape) == 3 and shape[0] == num_tokens, (
                f"routed_experts has shape {shape}, must be ({num_tokens}, _, _)"
            )

    @property
    def num_sequences(self) -> int:
        """N."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Tensor:
        """[N] int64: tokens of each sequence."""
        return self.cu_seqlens.diff().long()

    @property
    def sequence_index(self) -> Tensor:
        """[T] int64: the sequence each token belongs to."""
        return torch.arange(self.num_sequences, device=self.tokens.device).repeat_interleave(self.lengths)

    @property
    def positions(self) -> Tensor:
        """[T] int64: position of each token in its sequence, from 0."""
        starts = self.cu_seqlens[:-1].long().repeat_interleave(self.lengths)
        return torch.arange(self.num_tokens, device=self.tokens.device) - starts

    @property
    def score_names(self) -> tuple[str, ...]:
        """Which of the added per-token tensors are there."""
        return tuple(name for name in SCORES if getattr(self, name) is not None)

    @property
    def per_token_names(self) -> tuple[str, ...]:
        """All tensors that have a row for each token."""
        routed = () if self.routed_experts is None else ("routed_experts",)
        return (*_PER_TOKEN, *self.score_names, *routed)

    def scores(self, name: str) -> Tensor:
        """[T]: an added per-token tensor that must be there; the error says which are."""
        if name not in self.score_names:
            raise ValueError(f"the batch has no {name!r}; it has {', '.join(self.score_names) or 'no scores'}")
        tensor = getattr(self, name)
        assert isinstance(tensor, Tensor)
        return tensor

    def with_tensors(self, **named: Tensor) -> Self:
        """The batch with per-token tensors ([T], floating) added or replaced; positions outside loss_mask become 0.

        Raises ValueError for a name outside `SCORES`, another shape, type or device, and a tensor that carries a graph.
        """
        for name, tensor in named.items():
            self._check_score(name, tensor)
        masked = {name: torch.where(self.loss_mask, tensor.float(), 0.0) for name, tensor in named.items()}
        return dataclasses.replace(self, **masked)

    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """The sequences at `indices`, in that order, with all their tensors; a copy. None gives an empty batch."""
        device = self.tokens.device
        picked = torch.as_tensor(indices, dtype=torch.int64, device=device)
        lengths = self.lengths[picked]
        cu_seqlens = _cumulated(lengths)
        shift = self.cu_seqlens[:-1].long()[picked] - cu_seqlens[:-1].long()
        gather = torch.arange(int(cu_seqlens[-1]), device=device) + shift.repeat_interleave(lengths)
        per_token = {name: getattr(self, name)[gather] for name in self.per_token_names}
        per_sample = {name: getattr(self, name)[picked] for name in _PER_SAMPLE}
        return dataclasses.replace(self, cu_seqlens=cu_seqlens, **per_token, **per_sample)

    def dummy(self, num_tokens: int) -> Self:
        """One sequence of zeros with nothing to learn from, and the same tensors as this batch: an idle micro-batch."""
        rows = {name: getattr(self, name)[:0] for name in self.per_token_names}
        per_token = {name: empty.new_zeros(num_tokens, *empty.shape[1:]) for name, empty in rows.items()}
        if self.routed_experts is not None:
            per_token["routed_experts"].fill_(FREE)
        ids = {name: getattr(self, name).new_full((1,), NO_ID) for name in ("sample_ids", "group_ids")}
        cu_seqlens = self.cu_seqlens.new_tensor([0, num_tokens])
        return dataclasses.replace(self, cu_seqlens=cu_seqlens, rewards=self.rewards.new_zeros(1), **ids, **per_token)

    def to(self, device: torch.device | str) -> Self:
        """The batch on another device."""
        names = ("cu_seqlens", *_PER_SAMPLE, *self.per_token_names)
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})

    def _check_score(self, name: str, tensor: Tensor) -> None:
        if name not in SCORES:
            raise ValueError(f"{name!r} is no per-token tensor of a batch, must be one of {', '.join(SCORES)}")
        if tensor.shape != self.tokens.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be ({self.num_tokens},)")
        if not tensor.is_floating_point() or tensor.device != self.tokens.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, must be floating on {self.tokens.device}")
        if tensor.requires_grad:
            raise ValueError(f"{name} carries a graph; detach it, a batch holds constants")


def assemble(groups: Sequence[SampleGroup], *, first_sample_id: int = 0) -> TrainBatch:
    """All samples of `groups` in order as one batch on the CPU, numbered from `first_sample_id`.

    An answer may have no tokens; a prompt must have some, and every sample a reward.
    """
    pairs = [(group.prompt, sample) for group in groups for sample in group.samples]
    for prompt, sample in pairs:
        name = f"sample {sample.index} of prompt {prompt.id}"
        assert sample.prompt_id == prompt.id, f"{name} answers prompt {sample.prompt_id}"
        assert prompt.token_ids, f"prompt {prompt.id} ({prompt.source}) has no tokens"
        assert len(sample.logprobs) == len(sample.token_ids), f"{name} has another number of log-probs than tokens"
        assert sample.reward is not None, f"{name} was not judged"
    ends = [(len(prompt.token_ids), len(sample.token_ids)) for prompt, sample in pairs]
    num_prompt_and_answer = np.array(ends, dtype=np.int64).reshape(-1, 2)
    loss_mask = np.repeat(np.tile([False, True], len(pairs)), num_prompt_and_answer.reshape(-1))
    rollout_logp = np.zeros(loss_mask.shape, dtype=np.float32)
    rollout_logp[loss_mask] = np.fromiter(chain.from_iterable(sample.logprobs for _, sample in pairs), dtype=np.float32)
    sequences = chain.from_iterable(chain(prompt.token_ids, sample.token_ids) for prompt, sample in pairs)
    return TrainBatch(
        tokens=torch.from_numpy(np.fromiter(sequences, dtype=np.int64, count=len(loss_mask))),
        cu_seqlens=_cumulated(torch.from_numpy(num_prompt_and_answer.sum(1))),
        loss_mask=torch.from_numpy(loss_mask),
        rollout_logp=torch.from_numpy(rollout_logp),
        sample_ids=torch.arange(first_sample_id, first_sample_id + len(pairs)),
        group_ids=torch.tensor([prompt.id for prompt, _ in pairs], dtype=torch.int64),
        rewards=torch.tensor([sample.reward for _, sample in pairs], dtype=torch.float32),
        routed_experts=_routed_experts([sample.routed_experts for _, sample in pairs], num_prompt_and_answer.sum(1)),
    )


def _routed_experts(of_samples: Sequence[RoutedExperts | None], lengths: np.ndarray) -> Tensor | None:
    """[T, layers with experts, top_k] int16; the last token of a sequence, which the engine has not read, is FREE."""
    told = [routed for routed in of_samples if routed is not None]
    if not told:
        return None
    assert len(told) == len(of_samples), f"{len(told)} of {len(of_samples)} samples tell which experts they went to"
    table = np.full((lengths.sum(), told[0].num_layers, told[0].top_k), FREE, dtype=np.int16)
    for routed, start, length in zip(told, lengths.cumsum() - lengths, lengths, strict=True):
        assert routed.num_tokens == length - 1, f"experts of {routed.num_tokens} tokens for a sequence of {length}"
        chosen = np.frombuffer(routed.data, dtype=np.int16)
        table[start : start + length - 1] = chosen.reshape(routed.num_tokens, routed.num_layers, routed.top_k)
    return torch.from_numpy(table)


def concat(batches: Sequence[TrainBatch]) -> TrainBatch:
    """The sequences of all batches in order; raises ValueError for no batch, or for batches with different tensors."""
    if not batches:
        raise ValueError("concat needs at least one batch")
    names = batches[0].per_token_names
    for batch in batches:
        if batch.per_token_names != names:
            raise ValueError(f"concat: one batch has the tensors {names}, another {batch.per_token_names}")
    joined = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in (*_PER_SAMPLE, *names)}
    return TrainBatch(cu_seqlens=_cumulated(torch.cat([batch.lengths for batch in batches])), **joined)


def _cumulated(lengths: Tensor) -> Tensor:
    """[N] int64 -> [N+1] int32, from 0 to the sum; int32 is what packed attention kernels take."""
    cumulated = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    assert int(cumulated[-1]) < 2**31, f"a batch of {int(cumulated[-1])} tokens exceeds the range of int32 offsets"
    return cumulated.to(torch.int32)
