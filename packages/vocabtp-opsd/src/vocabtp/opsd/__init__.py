"""On-policy distillation of Hugging Face models with a vocabulary-parallel LM head."""

from vocabtp.opsd._version import __version__

__all__ = ["__version__"]
