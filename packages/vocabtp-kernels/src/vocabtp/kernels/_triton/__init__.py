"""Every op as Triton kernels: one read of each logit forward, one read and one write a gradient."""

from vocabtp.kernels._triton.fallback import UNLESS_BROKEN, broken
from vocabtp.kernels._triton.jsd import jsd_grad, jsd_terms, pair_stats
from vocabtp.kernels._triton.kl import kl_grad, kl_stats, kl_terms
from vocabtp.kernels._triton.launch import obstacle
from vocabtp.kernels._triton.merge import finish_kl, finish_terms, merge_pair
from vocabtp.kernels._triton.tokens import finish_tokens, token_grad, token_stats

__all__ = [
    "UNLESS_BROKEN",
    "broken",
    "finish_kl",
    "finish_terms",
    "finish_tokens",
    "jsd_grad",
    "jsd_terms",
    "kl_grad",
    "kl_stats",
    "kl_terms",
    "merge_pair",
    "obstacle",
    "pair_stats",
    "token_grad",
    "token_stats",
]
