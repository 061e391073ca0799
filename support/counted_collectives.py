"""Which functions of torch.distributed a block of code calls."""

import contextlib
import re
from unittest import mock

import torch.distributed as dist

COLLECTIVES = [
    name
    for name in dir(dist)
    if re.match(r"(all_|_all_|reduce|broadcast|scatter|gather|barrier|send|recv|isend|irecv)", name)
    and callable(getattr(dist, name))
]


@contextlib.contextmanager
def counted():
    """Names of the torch.distributed functions called inside, in order."""
    calls = []
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            real = getattr(dist, name)

            def fake(*args, _real=real, _name=name, **kwargs):
                calls.append(_name)
                return _real(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, name, fake))
        yield calls
