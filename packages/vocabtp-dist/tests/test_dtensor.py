"""DTensors bring group and bounds; their gradients are DTensors cut alike."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import vocabtp.dist as vd
from tp_places import at
from vocabtp import kernels
from vocabtp.dist.testing import ops
from vocabtp.kernels import reference

LEAD = (2, 3)


def _whole(vocab, device):
    g = torch.Generator().manual_seed(4)
    return [torch.randn(*LEAD, vocab, generator=g).to(device) for _ in range(2)]


def _values_and_gradients(rank, world, place):
    """Both sides DTensor, and a DTensor beside this rank's plain columns; uneven and empty too."""
    mesh = init_device_mesh(place.device, (world,))
    group = mesh.get_group()
    ids = torch.tensor([[0, 1, 2], [3, 4, 0]], device=place.device)
    for vocab in (7, 4):  # torch.chunk over 3: 3 3 1; 2 2 0
        whole = _whole(vocab, place.device)
        shard = vd.VocabShard.even(vocab, group)
        own = slice(shard.start, shard.end)
        for number, (title, op) in enumerate(ops().items()):
            sides = [
                DTensor.from_local(
                    x[..., own].clone(),
                    mesh,
                    [Shard(2)],
                    run_check=False,
                    shape=x.shape,
                    stride=x.stride(),
                ).requires_grad_()
                for x in whole[: op.sides]
            ]
            calls = [({}, sides), ({"shard": shard}, sides)]
            if not op.options:
                calls.append(({"tp_group": group}, sides))
            if op.sides == 2 and not op.options:
                plain = whole[1][..., own].clone().requires_grad_()
                calls.append(({"shard": shard}, [sides[0], plain]))
                calls.append(({}, [sides[0], plain]))
            if place.interpreted:  # one call of each op
                calls = calls[number % len(calls) :][:1] if number % 2 == vocab % 2 else []
            index = ids % vocab
            for call, local in calls:
                # ids as a replicated DTensor in every second call
                given = index if call else DTensor.from_local(index, mesh, [Replicate()])
                args = [*local, given] if op.takes_ids else local
                values = op.sharded(*args, **op.options, **call)
                values = values if isinstance(values, tuple) else (values,)
                up = [torch.arange(1.0, 1.0 + v.numel()).to(v).view(v.shape) for v in values]
                grads = torch.autograd.grad(values, local, up)
                fixed = [*whole[: op.sides], index] if op.takes_ids else whole[: op.sides]
                truth = op.truth(*fixed, **op.options)
                truth = truth if isinstance(truth, tuple) else (truth,)
                for value, right in zip(values, truth, strict=True):
                    assert not isinstance(value, DTensor)
                    torch.testing.assert_close(value.double(), right, atol=2e-6, rtol=2e-6)
                right = reference.gradients(
                    op.truth,
                    whole[: op.sides],
                    up,
                    index=index if op.takes_ids else None,
                    **op.options,
                )
                for x, grad, dense in zip(local, grads, right, strict=True):
                    if isinstance(x, DTensor):
                        assert isinstance(grad, DTensor)
                        assert grad.placements == x.placements == (Shard(2),)
                        assert grad.shape == x.shape == (*LEAD, vocab), title
                        # as a fresh tensor's: backward() copies what is strided otherwise
                        assert grad.stride() == x.stride() == whole[0].stride(), title
                        grad = grad.to_local()
                    torch.testing.assert_close(
                        grad.double(), dense[..., own], atol=2e-5, rtol=2e-6, msg=title
                    )
        x = sides[0].detach()
        assert torch.equal(vd.vocab_parallel_argmax(x), whole[0].argmax(-1))
        keys = vd.sampling_keys(torch.arange(6)).view(LEAD).to(place.device)
        drawn = vd.vocab_parallel_sample(x, keys=keys)
        assert torch.equal(drawn, vd.vocab_parallel_sample(whole[0], keys=keys))
        dt = distribute_tensor(whole[0], mesh, [Shard(-1)]).detach().requires_grad_()
        full = vd.gather_vocab(dt)
        assert torch.equal(full, whole[0])
        (full * full).sum().backward()
        assert isinstance(dt.grad, DTensor)
        assert dt.grad.placements == dt.placements
        assert dt.grad.stride() == dt.stride()
        assert torch.equal(dt.grad.to_local(), 2 * whole[0][..., own])
    return True


@at(eager=[3], interpreted=[3])
def test_values_and_gradients(tp):
    assert tp(_values_and_gradients, limit=120) == [True] * tp.world


def _through_a_layer(rank, world, place):
    """The gradient of a column-parallel head's weight, DTensor output, equals the dense one."""
    mesh = init_device_mesh(place.device, (world,))
    g = torch.Generator().manual_seed(9)
    weight, h = (torch.randn(n, 4, generator=g).to(place.device) for n in (7, 5))
    ids = torch.tensor([0, 6, 3, -100, 2], device=place.device)
    dense = weight.double().requires_grad_()
    (reference.logprobs(h.double() @ dense.t(), ids).sum()).backward()
    w = distribute_tensor(weight, mesh, [Shard(0)]).detach().requires_grad_()
    logits = DTensor.from_local(h, mesh, [Replicate()]) @ w.t()
    assert logits.placements == (Shard(1),)
    vd.vocab_parallel_logprobs(logits, ids).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor().double(), dense.grad, atol=1e-5, rtol=1e-5)
    return True


@at(eager=[2], interpreted=[2])
def test_gradient_reaches_the_head(tp):
    assert tp(_through_a_layer) == [True, True]


def _changed_in_place(rank, world, place):
    """Whatever DTensor a backward reads again: changed before it, it is refused as torch's ops do.

    Such a change is counted on the DTensor, and not on the local tensor that the ops keep.
    """
    mesh = init_device_mesh(place.device, (world,))
    whole = _whole(4, place.device)
    ids = torch.tensor([[0, 1, 2], [3, 3, 0]], device=place.device)
    shard = vd.VocabShard.even(4, mesh.get_group())
    for op in ops().values():
        if place.interpreted and op.options:
            continue
        for changed in range(op.sides + op.takes_ids):
            # that one alone is a DTensor
            given = [x[..., shard.start : shard.end].clone() for x in whole[: op.sides]]
            given += [ids.clone()] if op.takes_ids else []
            cut = Shard(2) if changed < op.sides else Replicate()
            given[changed] = DTensor.from_local(given[changed], mesh, [cut])
            given[0].requires_grad_()
            if op.sides == 2 and not op.options:
                given[1].requires_grad_()
            for touch in (False, True):
                values = op.sharded(*given, **op.options, shard=shard)
                if touch:
                    with torch.no_grad():
                        given[changed].add_(0)
                loss = sum(v.sum() for v in (values if isinstance(values, tuple) else (values,)))
                refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
                with refused if touch else contextlib.nullcontext():
                    torch.autograd.grad(loss, given[0])
    # ids of inference mode have no versions: what was there in the forward counts
    x = whole[0][..., shard.start : shard.end].clone().requires_grad_()
    with torch.inference_mode():
        drawn = DTensor.from_local(ids.clone(), mesh, [Replicate()])
    values = vd.vocab_parallel_logprobs(x, drawn, shard=shard)
    with torch.inference_mode():
        drawn.fill_(1)
    (grad,) = torch.autograd.grad(values.sum(), x)
    (right,) = torch.autograd.grad(vd.vocab_parallel_logprobs(x, ids, shard=shard).sum(), x)
    assert torch.equal(grad, right)
    return True


@at(eager=[2], interpreted=[2])
def test_a_dtensor_changed_before_the_backward_is_refused(tp):
    assert tp(_changed_in_place, limit=120) == [True, True]


def _refusals(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    other = init_device_mesh("cpu", (world,))  # the same ranks, another group
    flat = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    x = torch.zeros(4, 6)
    ids = torch.zeros(4, dtype=torch.int64)
    local = x[:, :3]
    good = distribute_tensor(x, mesh, [Shard(1)])
    attempts = {
        "replicated": (distribute_tensor(x, mesh, [Replicate()]), {}, "last dimension"),
        "rows": (distribute_tensor(x, mesh, [Shard(0)]), {}, "last dimension"),
        "partial": (DTensor.from_local(x, mesh, [Partial()]), {}, "last dimension"),
        "two dimensions": (
            distribute_tensor(x, flat, [Replicate(), Shard(1)]),
            {},
            "one-dimensional mesh",
        ),
        "another group": (good, {"tp_group": dist.new_group([0, 1])}, "over another group"),
        "another shard": (
            good,
            {"shard": vd.VocabShard(2 * rank, 2 * rank + 4, 6, mesh.get_group())},
            "shard says columns",
        ),
        "lies about its shape": (
            DTensor.from_local(x, mesh, [Shard(1)], shape=(4, 6), stride=(6, 1), run_check=False),
            {},
            "these look like gathered logits",
        ),
    }
    if other.get_group() != mesh.get_group():
        attempts["group of the shard"] = (
            good,
            {"shard": vd.VocabShard.even(6, other.get_group())},
            "over another group",
        )
    out = []
    for name, (tensor, call, text) in attempts.items():
        for title, op in ops().items():
            args = [tensor] * op.sides + ([ids] if op.takes_ids else [])
            with pytest.raises(ValueError, match=text) as info:
                op.sharded(*args, **op.options, **call)
            out.append((name, title, str(info.value)))
        if not call:
            for f in (
                vd.vocab_parallel_argmax,
                vd.gather_vocab,
                lambda t: vd.vocab_parallel_sample(t, keys=ids),
            ):
                with pytest.raises(ValueError, match=text):
                    f(tensor)
    # gathered or unequal columns beside a DTensor; ids that are sharded
    for pair in ([good, x], [x, good], [good, x[:, : 2 + rank]]):
        with pytest.raises(ValueError, match=r"has \d columns, but the shard is columns") as info:
            vd.vocab_parallel_kl_div(*pair)
        out.append(str(info.value))
    sharded_ids = distribute_tensor(ids, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="index is a DTensor placed") as info:
        vd.vocab_parallel_logprobs(good, sharded_ids)
    out.append(str(info.value))
    vd.vocab_parallel_kl_div(good, local)
    # the ops of one device say who takes it
    for call in (
        lambda: kernels.entropy(good),
        lambda: kernels.kl_div(x, good),
        lambda: kernels.jsd(good, x),
        lambda: kernels.logprobs(good, ids),
        lambda: kernels.logprobs_and_entropy(x, distribute_tensor(ids, mesh, [Replicate()])),
    ):
        with pytest.raises(TypeError, match=r"plain tensor, got DTensor; .* vocabtp\.dist"):
            call()
    return out


def test_other_dtensors_are_refused_on_every_rank(ranks):
    first, second = ranks(_refusals, 2)
    assert len(first) == len(second)
    # "another shard" is told by each rank's own bounds
    same = [a == b for a, b in zip(first, second, strict=True) if "another shard" not in a]
    assert all(same)
