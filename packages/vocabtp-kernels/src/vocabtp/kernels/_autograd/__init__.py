"""One autograd.Function an op: statistics, one exchange, merge in rank order, finish.

Every forward reads the shard (`stats`), lets all ranks see all statistics (`exchange.gather`) and
finishes the value from the merged ones. The backward reads the shard once more, needs no exchange,
and assumes that every rank back-propagates the same upstream gradient. `ctx` holds the inputs and
`[*, N]` statistics, never an output (the caller may mask it in place) and nothing of `[N, L]`.
"""

from vocabtp.kernels._autograd.function import call
from vocabtp.kernels._autograd.pairs import Jsd, KlDiv
from vocabtp.kernels._autograd.tokens import Entropy, Logprobs, LogprobsAndEntropy

__all__ = ["Entropy", "Jsd", "KlDiv", "Logprobs", "LogprobsAndEntropy", "call"]
