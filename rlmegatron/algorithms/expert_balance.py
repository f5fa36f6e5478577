"""Owns the arithmetic of balance between experts: a loss per sequence, how uneven a load is, the step of a bias.

In: router scores and counts of tokens. Out: a sum to differentiate, numbers per layer, a change of bias. Must never
import torch.distributed or the configuration; the counts have been summed over ranks before.
"""

# T tokens, N sequences, E experts, L layers

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.shapes import expect

_NO_ZERO = 1e-20  # the sum of a token's sigmoid scores may vanish


def choices_per_sequence(chosen: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """[N E] float32: how many tokens of each sequence chose each expert.

    chosen: [T E] bool. sequence: [T] int64, the number of each token's sequence; N for tokens that do not count.

    >>> chosen = torch.tensor([[True, False], [True, False], [False, True]])
    >>> choices_per_sequence(chosen, torch.tensor([0, 0, 1]), 1).tolist()
    [[2.0, 0.0]]
    """
    counts = torch.zeros(num_sequences + 1, chosen.shape[1], device=chosen.device)
    return counts.index_add_(0, sequence, chosen.float())[:num_sequences]


def sequence_balance(scores: Tensor, sequence: Tensor, lengths: Tensor, choices: Tensor, *, top_k: int) -> Tensor:
    """Sum over sequences of sum_i f_i P_i (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20); 1 a sequence is balanced.

    scores: [T E], not negative; a token's are divided by their sum. sequence: [T] as above. lengths: [N] tokens of the
    whole sequence. choices: [N E] of the whole sequence, by scores alone: neither bias nor groups enter eq. 18. Where a
    rank holds only some tokens of a sequence it gets their part of the sum. The gradient is that of P alone.

    Two tokens, both choose expert 0: f = (2, 0), P = ((0.75 + 0.5) / 2, ...), so f P = 1.25.

    >>> scores = torch.tensor([[3.0, 1.0], [0.5, 0.5]])
    >>> float(sequence_balance(
    ...     scores, torch.tensor([0, 0]), torch.tensor([2]), torch.tensor([[2.0, 0.0]]), top_k=1
    ... ))
    1.25
    """
    _, num_experts = expect("T E", scores=scores)
    (num_sequences,) = expect("N", lengths=lengths)
    expect("N E", choices=choices)
    # Cut what does not count off before the division: the gradient of a NaN is NaN even at weight 0.
    scores = torch.where(sequence[:, None] < num_sequences, scores, 1.0)
    lengths = lengths[:, None].float()
    frequency = choices * (num_experts / top_k) / lengths
    per_token = torch.cat([frequency / lengths, frequency.new_zeros(1, num_experts)])
    shares = scores / (scores.sum(-1, keepdim=True) + _NO_ZERO)
    return (shares * per_token[sequence]).sum()


def max_violation(load: Tensor) -> Tensor:
    """[L] of load [L E]: the most loaded expert's load over the mean, less 1 (MaxVio, arXiv 2408.15664, section 4).

    >>> max_violation(torch.tensor([[3.0, 1.0], [2.0, 2.0]])).tolist()
    [0.5, 0.0]
    """
    expect("L E", load=load)
    return load.amax(-1) / load.mean(-1) - 1


def variation(load: Tensor) -> Tensor:
    """[L] of load [L E]: the standard deviation over experts (of the population) as a share of the mean.

    >>> variation(torch.tensor([[3.0, 1.0], [2.0, 2.0]])).tolist()
    [0.5, 0.0]
    """
    expect("L E", load=load)
    return load.std(-1, correction=0) / load.mean(-1)


def bias_step(load: Tensor, rate: float) -> Tensor:
    """[L E]: what is added to the biases, rate * sign(mean load - load) (arXiv 2408.15664, algorithm 1).

    >>> bias_step(torch.tensor([[3.0, 1.0, 2.0]]), 0.5).tolist()
    [[-0.5, 0.5, 0.0]]
    """
    expect("L E", load=load)
    return rate * (load.mean(-1, keepdim=True) - load).sign()
