"""Vocabulary-parallel losses and token choice over torch.distributed; no rank gathers."""

from vocabtp.dist._version import __version__
from vocabtp.dist.agreement import agree
from vocabtp.dist.collectives import GroupExchange
from vocabtp.dist.gather import gather_vocab
from vocabtp.dist.ops import (
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
    vocab_parallel_logprobs_and_entropy,
)
from vocabtp.dist.sampling import sampling_keys, vocab_parallel_argmax, vocab_parallel_sample
from vocabtp.dist.shard import VocabShard

__all__ = [
    "GroupExchange",
    "VocabShard",
    "__version__",
    "agree",
    "gather_vocab",
    "sampling_keys",
    "vocab_parallel_argmax",
    "vocab_parallel_entropy",
    "vocab_parallel_jsd",
    "vocab_parallel_kl_div",
    "vocab_parallel_logprobs",
    "vocab_parallel_logprobs_and_entropy",
    "vocab_parallel_sample",
]
