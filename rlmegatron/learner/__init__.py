"""The learner: Megatron-Core models that score and learn. Importing it makes megatron-core usable on this machine."""

import warnings

from rlmegatron.platform.megatron_cpu import prepare_megatron

# Once per rank and of no use to who trains: Megatron-Core on names of its own and of torch that are going out of use.
warnings.filterwarnings("ignore", module=r"megatron\.core\.")
warnings.filterwarnings("ignore", message=r"`?torch\.distributed\.\w+`? is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message="Please use DTensor", category=FutureWarning)

prepare_megatron()
