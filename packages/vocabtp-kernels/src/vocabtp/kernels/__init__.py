"""Distillation and RL losses over a large vocabulary: logprobs, entropy, KL and JSD with exact gradients, on one device or one shard."""

from vocabtp.kernels._version import __version__

__all__ = ["__version__"]
