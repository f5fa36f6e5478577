"""Which quantised checkpoints can be read: DeepSeek's FP8 weights in blocks, each with a scale.

In: config.json. Out: the block's shape. Pure; must never import torch.
"""

from __future__ import annotations

from rlmegatron.models.config_keys import ConfigKeys

SCALE_SUFFIX = "_scale_inv"
"""Of the tensor that holds a weight's scales: `weight = fp8 weight * weight_scale_inv`, block by block."""
# How scales are rounded and which weights are left alone shows in the tensors themselves.
_UNDERSTOOD = {
    "quant_method",
    "fmt",
    "weight_block_size",
    "activation_scheme",
    "scale_fmt",
    "modules_to_not_convert",
    "dequantize",
}


def read_quantization(keys: ConfigKeys) -> tuple[int, int] | None:
    """Rows and columns of one FP8 block, or None for a checkpoint that is not quantised."""
    found = keys.optional("quantization_config")
    if found is None:
        return None
    if not isinstance(found, dict) or found.get("quant_method") != "fp8":
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise ValueError(f"config.json: quantization_config of method {method!r} is not supported; supported: 'fp8'")
    unknown = sorted(key for key, value in found.items() if key not in _UNDERSTOOD and value is not None)
    if unknown:
        shown = ", ".join(f"{key} = {found[key]!r}" for key in unknown)
        raise ValueError(f"config.json: quantization_config: not understood: {shown}"[:300])
    if found.get("activation_scheme") not in (None, "dynamic"):
        raise ValueError(
            f"config.json: quantization_config: activation_scheme = {found['activation_scheme']!r} is not supported; "
            "supported: 'dynamic'"
        )
    block = found.get("weight_block_size")
    if found.get("fmt", "e4m3") != "e4m3" or not isinstance(block, list) or len(block) != 2:
        raise ValueError(
            f"config.json: quantization_config needs fmt 'e4m3' and a weight_block_size of two numbers, it has "
            f"{found.get('fmt')!r} and {block!r}"
        )
    if not all(isinstance(size, int) and size > 0 for size in block):
        raise ValueError(f"config.json: quantization_config: weight_block_size is {block!r}; use two whole numbers")
    return block[0], block[1]
