"""Parts that are not those of torch.chunk, and models that AutoTP would have to guess about."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Shard

from tiny_models import tiny_config
from vocabtp.opsd.config import StudentConfig
from vocabtp.opsd.engine.places import Place, even_sizes, set_place, unwrapped, wrapped
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.model_files import check_layout
from vocabtp.opsd.parallel import make_layout


def uneven(rank, world, dim, dtype):
    """A part made a DTensor, its whole, and the part made of the DTensor again."""
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    shape = [10, 10, 10]
    whole = torch.arange(1000.0).reshape(shape).to(dtype)
    sizes = (4, 3, 3)
    part = torch.nn.Parameter(whole.split(sizes, dim)[rank].clone())
    placements, stride = [Shard(dim)], whole.stride()
    place = Place(
        mesh=layout.mesh["tp"],
        placements=placements,
        shape=whole.shape,
        stride=stride,
        sizes=sizes,
    )
    set_place(part, place)
    made = wrapped(part, part.detach())
    assert whole[place.own].equal(part)
    assert made.to_local().equal(whole.chunk(world, dim)[rank])
    assert made.full_tensor().equal(whole)
    assert unwrapped(part, made).equal(part)
    scalar = torch.tensor(3.0)
    assert unwrapped(part, scalar) is scalar or unwrapped(part, scalar).equal(scalar)
    return even_sizes(10, world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_other_parts_than_those_of_torch(ranks, dim, dtype):
    assert ranks(uneven, 3, dim, dtype) == [(4, 4, 2)] * 3


def test_models_that_autotp_would_guess_about():
    section = StudentConfig(model_name_or_path="o/s")
    check_layout(section, tiny_config("qwen3", tied=True), "student", 2, True, "autotp")
    for kind, reason in (("gpt2", "no tensor-parallel plan"), ("gemma2", "more than a look-up")):
        config = tiny_config(kind, tied=True)
        check_layout(section, config, "student", 2, True, "plan")
        with pytest.raises(ModelError, match=rf"^student 'o/s': .*{reason}.*tp_by to plan"):
            check_layout(section, config, "student", 2, True, "autotp")


@pytest.mark.parametrize(("size", "parts"), [(10, 3), (5, 4), (9, 6), (2, 5)])
def test_even_sizes_are_those_of_chunk(size, parts):
    made = tuple(len(part) for part in torch.arange(size).chunk(parts))
    assert even_sizes(size, parts) == made + (0,) * (parts - len(made))
