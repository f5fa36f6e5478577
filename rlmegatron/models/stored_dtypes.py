"""The types of torch that weights in safetensors files have, by their names in a header.

In: nothing. Out: a table. Must never import anything but torch and `safetensors_header.py`.
"""

from __future__ import annotations

import torch

from rlmegatron.models.safetensors_header import FP8

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, FP8: torch.float8_e4m3fn}
