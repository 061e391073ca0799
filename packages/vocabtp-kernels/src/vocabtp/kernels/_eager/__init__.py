"""Every op in chunked PyTorch: the CPU path, the fallback, and the yardstick of other paths."""

from vocabtp.kernels._eager.jsd import jsd_grad, jsd_terms, pair_stats
from vocabtp.kernels._eager.kl import kl_grad, kl_stats, kl_terms
from vocabtp.kernels._eager.tokens import token_grad, token_stats
from vocabtp.kernels._stats import finish_entropy, finish_kl, finish_terms, pair_scale

__all__ = [
    "finish_entropy",
    "finish_kl",
    "finish_terms",
    "jsd_grad",
    "jsd_terms",
    "kl_grad",
    "kl_stats",
    "kl_terms",
    "pair_scale",
    "pair_stats",
    "token_grad",
    "token_stats",
]
