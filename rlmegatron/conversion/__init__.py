"""Between Hugging Face directories and Megatron checkpoints. Importing it makes megatron-core usable anywhere."""

from rlmegatron.platform.megatron_cpu import prepare_megatron

prepare_megatron()
