"""The general transport: whole Hugging Face tensors, bucket by bucket, placed by SGLang's own loader.

In: a `TensorStream` of the policy. Out: loaded engines. It is slow and works for everything; faster transports are
tested against it bit for bit.
"""

from __future__ import annotations

import torch

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.stream import TensorStream
from rlmegatron.rollout.api import RolloutEngine
from rlmegatron.weight_sync.engine_loader import loadable


class HfStream:
    """Streams the whole model to each engine once per publish."""

    name = "hf_stream"

    def __init__(self, stream: TensorStream, arch: Architecture, *, dtype: torch.dtype, bytes_per_bucket: int) -> None:
        self._stream, self._arch = stream, arch
        self._dtype, self._bytes_per_bucket = dtype, bytes_per_bucket

    def transfer(self, engine: RolloutEngine | None) -> None:
        """See `Transport`."""
        failure: Exception | None = None
        buckets = self._stream.buckets(
            bytes_per_bucket=self._bytes_per_bucket, dtype=self._dtype, receive=engine is not None
        )
        if engine is None:
            for _ in buckets:
                pass
            return
        for bucket in loadable(buckets, self._arch):
            if failure is not None or not bucket:
                continue
            try:
                engine.update_weights(bucket)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
