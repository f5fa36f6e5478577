"""What the forkserver imports once, so that a rank starts in a second: torch, megatron-core, the package, transformers.

In: nothing. Out: loaded modules. Must never start a thread or a process group: both would not survive the fork.
"""

import faulthandler
import logging

from rlmegatron.platform.torchvision_ops import install_torchvision_hook

install_torchvision_hook()

import pytest  # noqa: E402, F401
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM  # noqa: E402, F401
from transformers.utils.logging import disable_progress_bar  # noqa: E402

import rlmegatron.checkpoint.tensors  # noqa: E402
import rlmegatron.learner.learner  # noqa: E402, F401

disable_progress_bar()
logging.getLogger("megatron").setLevel(logging.ERROR)
faulthandler.enable()
