"""Every op as Triton kernels: one read of each logit forward, one read and one write a gradient."""

from vocabtp.kernels._triton.jsd import jsd_grad, jsd_terms, pair_stats
from vocabtp.kernels._triton.kl import kl_grad, kl_stats, kl_terms
from vocabtp.kernels._triton.tokens import token_grad, token_stats

__all__ = [
    "jsd_grad",
    "jsd_terms",
    "kl_grad",
    "kl_stats",
    "kl_terms",
    "pair_stats",
    "token_grad",
    "token_stats",
]
