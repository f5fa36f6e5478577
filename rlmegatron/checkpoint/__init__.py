"""Checkpoints of everything a run needs to go on. Importing it makes megatron-core usable on this machine."""

from rlmegatron.platform.megatron_cpu import prepare_megatron

prepare_megatron()
