import pytest
import torch

from tiny_models import tiny_model
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.sharding import gathered, release, shard_module, sharding_of


def test_weights_of_several_dtypes_are_refused():
    """They would be gathered and rounded together, without a word."""
    module = tiny_model("llama")
    module.model.norm.to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"m: .*dtypes \(bfloat16, float32\).*parallel\.shard"):
        shard_module(module, None, free=True, name="m")


def test_a_whole_module_is_left_as_it_is():
    module = tiny_model("llama")
    before = dict(module.named_parameters())
    with gathered(module):
        assert sharding_of(module) is None
    release(module)
    assert all(before[name] is parameter for name, parameter in module.named_parameters())
