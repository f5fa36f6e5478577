"""Length shaping: the penalty `overlong` on answers that come near the length at which they are cut off.

In: an `Answer`. Out: a number in [-1, 0], to be added to a correctness reward with `combine`. Must never import torch.
"""

from __future__ import annotations

from rlmegatron.rewards.api import Answer


def overlong(answer: Answer, *, max_tokens: int, buffer_tokens: int) -> float:
    """Soft over-long punishment (DAPO, Yu et al. 2025, arXiv 2503.14476, equation 13).

    With n = tokens of the answer, EOS included: 0 while n <= max_tokens - buffer_tokens, then falling linearly to -1 at
    n = max_tokens, and -1 beyond. max_tokens is the paper's L_max, buffer_tokens its L_cache; both in tokens.
    """
    num_over = len(answer.token_ids) - (max_tokens - buffer_tokens)
    return -min(max(num_over / buffer_tokens, 0.0), 1.0)


def check_overlong(*, max_tokens: int, buffer_tokens: int) -> None:
    """Raises ValueError unless 0 < buffer_tokens <= max_tokens."""
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"reward.args.buffer_tokens: {buffer_tokens} is not allowed, "
            f"must be at least 1 and at most max_tokens ({max_tokens})"
        )
