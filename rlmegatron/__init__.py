"""rlmegatron: reinforcement-learning post-training of language models on Megatron-Core and SGLang.

Importing this package loads nothing else; see README.md for the reading order.
"""

__version__ = "0.1.0"
