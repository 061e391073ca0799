"""Distillation and RL losses over a large vocabulary, on one device or one shard.

Log-probabilities, entropy, KL and JSD with exact gradients; `reference` defines them in dense fp64
and `testing` holds the cases that every implementation of them must pass.
"""

from vocabtp.kernels._backend import backend, which_backend
from vocabtp.kernels._exchange import LOCAL, Exchange, name_exchanges
from vocabtp.kernels._ids import check_ids
from vocabtp.kernels._stats import ShardStats
from vocabtp.kernels._version import __version__
from vocabtp.kernels.ops import entropy, jsd, kl_div, logprobs, logprobs_and_entropy

__all__ = [
    "LOCAL",
    "Exchange",
    "ShardStats",
    "__version__",
    "backend",
    "check_ids",
    "entropy",
    "jsd",
    "kl_div",
    "logprobs",
    "logprobs_and_entropy",
    "name_exchanges",
    "which_backend",
]
