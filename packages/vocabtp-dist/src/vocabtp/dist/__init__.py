"""Vocabulary-parallel logprobs, entropy, KL and JSD over torch.distributed: no rank gathers the vocabulary."""

from vocabtp.dist._version import __version__

__all__ = ["__version__"]
