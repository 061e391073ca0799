"""A teacher's distribution kept in host memory between its forward pass and the student's loss."""

from vocabtp.cache._ahead import PREFETCH_BYTES
from vocabtp.cache._identity import Identity
from vocabtp.cache._version import __version__
from vocabtp.cache.hidden import TeacherHead, TeacherHiddenCache
from vocabtp.cache.logits import TeacherLogitCache
from vocabtp.cache.pool import PinnedPool, default_pool
from vocabtp.cache.stream import TeacherLogitStream
from vocabtp.cache.teacher import TeacherCache

__all__ = [
    "PREFETCH_BYTES",
    "Identity",
    "PinnedPool",
    "TeacherCache",
    "TeacherHead",
    "TeacherHiddenCache",
    "TeacherLogitCache",
    "TeacherLogitStream",
    "__version__",
    "default_pool",
]
