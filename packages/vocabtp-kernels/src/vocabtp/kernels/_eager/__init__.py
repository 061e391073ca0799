"""Every op in chunked PyTorch: the CPU path, the fallback, and the yardstick of other paths."""

from vocabtp.kernels._eager.jsd import jsd_grad, jsd_terms, pair_stats
from vocabtp.kernels._eager.kl import kl_grad, kl_stats, kl_terms
from vocabtp.kernels._eager.tokens import finish_tokens, token_grad, token_stats
from vocabtp.kernels._stats import finish_kl, finish_terms, merge_pair

__all__ = [
    "finish_kl",
    "finish_terms",
    "finish_tokens",
    "jsd_grad",
    "jsd_terms",
    "kl_grad",
    "kl_stats",
    "kl_terms",
    "merge_pair",
    "pair_stats",
    "token_grad",
    "token_stats",
]
