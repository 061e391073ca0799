from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import vocabtp.opsd.sharding as sharding_module
from tiny_models import tiny_model
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.loading import place_model
from vocabtp.opsd.parallel import make_layout
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


def _offloaded(rank, world):
    """Which units are kept on the host, and logits of a model that is kept there."""
    shard, seen = sharding_module.fully_shard, []

    def fully_shard(unit, **options):
        seen.append(isinstance(options["offload_policy"], CPUOffloadPolicy))
        return shard(unit, **options)

    sharding_module.fully_shard = fully_shard
    layout = make_layout(SimpleNamespace(tp=1, device="cpu", shard="zero3"))
    tokens = torch.arange(20).view(2, 10)
    mask, response = torch.ones_like(tokens), (torch.arange(10) > 6).expand(2, 10)
    out = []
    for offload in (False, True):
        model = place_model(
            tiny_model("llama", seed=1), layout, name="t", trainable=False, offload=offload
        )
        with torch.no_grad():
            out.append(model.response_logits(tokens, mask, response))
        release(model.module)
    sharding_module.fully_shard = shard
    assert torch.equal(*out)
    return seen


def test_parts_may_be_kept_on_the_host(ranks):
    # two layers and the rest
    assert ranks(_offloaded, 2) == [[False] * 3 + [True] * 3] * 2
