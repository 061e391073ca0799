import math

import pytest
import torch
from torch import nn

from vocabtp.opsd.config import ParallelConfig, TrainingConfig
from vocabtp.opsd.engine import Schedule, TorchEngine
from vocabtp.opsd.parallel import Layout, make_layout


def config(**changes):
    base = {"learning_rate": 0.1, "lr_scheduler": "constant", "max_grad_norm": 0}
    return TrainingConfig.model_validate(base | changes)


def step(engine, index=0, *, tokens=1, loss=1.0, own=(0,)):
    return engine.step(index, tokens=tokens, report=[loss, 7.0], own=list(own))


class Net(nn.Module):
    """A matrix and a bias, so that both kinds of parameters are there."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 3).to(dtype))
        self.bias = nn.Parameter(torch.randn(5).to(dtype))
        self.unused = nn.Parameter(torch.ones(2, 2, dtype=dtype))

    def forward(self, x):
        return (x @ self.weight.T + self.bias).float().square().mean()


def inputs(seed, dtype=torch.float32):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_schedule_by_hand():
    cosine = Schedule(kind="cosine", peak=2.0, warmup=2, total=6)
    expected = [1.0, 2.0, 2.0, 1 + math.cos(math.pi / 4), 1.0, 1 + math.cos(3 * math.pi / 4)]
    assert [cosine(i) for i in range(6)] == pytest.approx(expected)
    linear = Schedule(kind="linear", peak=2.0, warmup=0, total=4)
    assert [linear(i) for i in range(5)] == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])
    constant = Schedule(kind="constant", peak=2.0, warmup=4, total=5)
    assert [constant(i) for i in range(6)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_are_those_of_the_plain_optimizer(name):
    net, truth = Net(), Net()
    settings = config(
        optimizer=name, weight_decay=0.1, lr_scheduler="linear", max_grad_norm=0.5, warmup_steps=1
    )
    engine = TorchEngine(net, settings, Layout(), 3)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    matrix = {"params": [truth.weight, truth.unused], "weight_decay": 0.1}
    plain = kinds[name]([matrix, {"params": [truth.bias], "weight_decay": 0.0}], lr=0.1)
    for i in range(3):
        # two micro-batches add up, nothing is averaged
        engine.backward(net(inputs(2 * i)))
        engine.backward(net(inputs(2 * i + 1)))
        result = step(engine, i)
        (truth(inputs(2 * i)) + truth(inputs(2 * i + 1))).backward()
        norm = nn.utils.clip_grad_norm_([truth.weight, truth.bias], 0.5)
        plain.param_groups[0]["lr"] = plain.param_groups[1]["lr"] = [0.1, 0.1, 0.05][i]
        plain.step()
        plain.zero_grad()
        assert result.applied
        assert result.learning_rate == pytest.approx([0.1, 0.1, 0.05][i])
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert result.reports.tolist() == [[1.0, 7.0]]
        for mine, theirs in zip(net.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    # nothing ever gave this one a gradient: weight decay must not move it
    assert torch.equal(net.unused, torch.ones(2, 2))


def test_bf16_weights_learn_through_fp32_masters():
    """Each update is far below what a bf16 weight can resolve; together they are not."""
    net, truth = Net(torch.bfloat16), Net(torch.bfloat16).float()
    settings = config(learning_rate=1e-3, adam_eps=1e-3)
    engine = TorchEngine(net, settings, Layout(), 40)
    plain = torch.optim.AdamW(truth.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    start = net.weight.detach().clone()
    for i in range(40):
        x = inputs(0, torch.bfloat16)
        engine.backward(net(x))
        step(engine, i)
        truth(x.float()).backward()
        plain.step()
        plain.zero_grad()
    assert net.weight.dtype == torch.bfloat16
    assert (net.weight - start).abs().min() > 0
    masters = engine.state_tensors()
    assert masters["optimizer.weight.master"].dtype == torch.float32
    torch.testing.assert_close(masters["optimizer.weight.master"], truth.weight, rtol=0, atol=2e-3)
    assert torch.equal(net.weight, masters["optimizer.weight.master"].bfloat16())


@pytest.mark.parametrize(
    ("case", "reason"),
    [("tokens", "no response token"), ("loss", "loss is not finite"), ("norm", "gradient norm")],
)
def test_a_step_without_meaning_moves_nothing(case, reason):
    net = Net()
    engine = TorchEngine(net, config(weight_decay=0.5), Layout(), 4)
    engine.backward(net(inputs(0)))
    assert step(engine).applied
    before = {k: v.clone() for k, v in (net.state_dict() | engine.state_tensors()).items()}
    if case != "tokens":
        engine.backward(net(inputs(1)) * (math.inf if case == "norm" else 1.0))
    result = step(engine, 1, tokens=int(case != "tokens"), loss=math.nan if case == "loss" else 1.0)
    assert not result.applied
    assert reason in result.reason
    after = net.state_dict() | engine.state_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    # what was not applied does not leak into the next step
    engine.backward(net(inputs(2)))
    norm = step(engine, 2).grad_norm
    fresh = Net()
    fresh.load_state_dict({k: v for k, v in before.items() if k in fresh.state_dict()})
    fresh(inputs(2)).backward()
    grads = [p.grad for p in fresh.parameters() if p.grad is not None]
    assert norm == pytest.approx(nn.utils.get_total_norm(grads).item(), rel=1e-6)


def sharded_net(mesh):
    """B59: a sharded weight and a replicated one, as tensor parallelism leaves them."""
    from torch.distributed.tensor import Shard, distribute_tensor

    net = nn.Module()
    net.cut = nn.Parameter(distribute_tensor(torch.zeros(2, 1), mesh, [Shard(0)]))
    net.norm = nn.Parameter(torch.zeros(1))
    return net


def norms(rank, world):
    """Norm and clipped gradients at TP=2 and at DP=2, and what data-parallel ranks agree on."""
    out = {}
    layout = make_layout(ParallelConfig(tp=2, device="cpu"))
    net = sharded_net(layout.mesh["tp"])
    engine = TorchEngine(net, config(optimizer="sgd", learning_rate=1, max_grad_norm=1), layout, 1)
    # the sum's gradient: (3, 4) over the shards, 12 on each replica
    weights = torch.tensor([[3.0], [4.0]])[rank : rank + 1]
    engine.backward((net.cut.to_local() * weights).sum() + 12 * net.norm.sum())
    result = step(engine, own=[rank])
    out["tp"] = (result.grad_norm, net.cut.full_tensor().flatten().tolist(), net.norm.item())
    out["ranks"] = result.ranks.tolist()

    layout = make_layout(ParallelConfig(tp=1, device="cpu"))
    net = nn.Module()
    net.cut, net.norm = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    engine = TorchEngine(net, config(optimizer="sgd", learning_rate=1, max_grad_norm=1), layout, 1)
    part = [0.25, 0.75][rank]
    engine.backward(((net.cut * torch.tensor([3.0, 4.0])).sum() + 12 * net.norm.sum()) * part)
    result = step(engine, loss=float(rank))
    out["dp"] = (result.grad_norm, net.cut.tolist(), net.norm.item())
    out["reports"] = result.reports.tolist()

    # rank 1 has nothing to add; one parameter has a gradient nowhere
    net, truth = Net(), Net()
    engine = TorchEngine(net, config(weight_decay=0.1), layout, 2)
    if rank == 0:
        engine.backward(net(inputs(0)))
    out["one"] = step(engine).applied
    alone = TorchEngine(truth, config(weight_decay=0.1), Layout(), 2)
    alone.backward(truth(inputs(0)))
    step(alone)
    out["same"] = all(
        torch.equal(a, b) for a, b in zip(net.parameters(), truth.parameters(), strict=True)
    )
    out["unused"] = net.unused.tolist()
    # one rank's loss is not finite: both skip
    engine.backward(net(inputs(1)))
    result = step(engine, 1, loss=math.inf if rank else 1.0)
    out["skipped"] = (result.applied, result.reason)
    return out


def test_gradient_norm_counts_replicas_once_and_ranks_agree(ranks):
    for out in ranks(norms, 2):
        for kind in ("tp", "dp"):
            norm, cut, replica = out[kind]
            # counting the replica twice gives 17.69
            assert norm == pytest.approx(13.0, abs=1e-5)
            assert [-x for x in cut] == pytest.approx([3 / 13, 4 / 13], abs=1e-6)
            assert -replica == pytest.approx(12 / 13, abs=1e-6)
        assert out["ranks"] == [[0.0], [1.0]]
        assert out["reports"] == [[0.0, 7.0], [1.0, 7.0]]
        assert out["one"]
        assert out["same"]
        assert out["unused"] == [[1.0, 1.0], [1.0, 1.0]]
        assert out["skipped"] == (False, "the loss is not finite")
