"""What a checkpoint's metadata may name, by every way that a release of Python pickles it."""

import io
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata

from vocabtp.opsd._tensor_reader import _Unpickler


class Call:
    """Pickled as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def read(what):
    return _Unpickler(io.BytesIO(pickle.dumps(what))).load()


def test_members_of_an_enumeration_by_their_name():
    member = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    assert read(member) is member
    # as Python 3.11.2 writes it, and 3.11.7 does not
    assert read(Call(getattr, _MEM_FORMAT_ENCODING, member.name)) is member


def test_what_else_it_is_made_of():
    for what in (torch.Size([2, 3]), torch.bfloat16, torch.strided):
        assert read(what) == what
    assert isinstance(read(BytesStorageMetadata()), BytesStorageMetadata)


@pytest.mark.parametrize(
    "what",
    [
        Call(os.system, "true"),
        Call(getattr, BytesStorageMetadata, "__init__"),
        Call(getattr, _MEM_FORMAT_ENCODING, "__class__"),
        Call(getattr, torch.Size([1]), "count"),
        Call(eval, "1"),
    ],
)
def test_nothing_else(what):
    with pytest.raises(pickle.UnpicklingError, match="metadata refers to"):
        read(what)
