"""The learner: Megatron-Core models that score and learn. Importing it makes megatron-core usable on this machine."""

from rlmegatron.platform.megatron_cpu import prepare_megatron

prepare_megatron()
