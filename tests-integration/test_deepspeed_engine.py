"""What DeepSpeed does by itself, and must not do here; on two ranks and a net of twenty weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tiny_run import tiny_run

LR = 0.1
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
TRAINING = {
    "train_batch_size": None,
    "micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": LR,
    "lr_scheduler": "constant",
    "optimizer": "sgd",
    "max_grad_norm": 0,
}


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator).to(dtype))
        self.bias = nn.Parameter(torch.randn(4, generator=generator).to(dtype))

    def forward(self, x):
        return (x @ self.weight.T + self.bias[: len(self.weight)]).float().square().mean()


def inputs(seed, dtype=torch.float32):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(path, tp, net, *overrides):
    """An engine over `net`, on all ranks; `overrides` are those of a run."""
    from vocabtp.opsd.config import load_config
    from vocabtp.opsd.engine.deepspeed_engine import DeepSpeedEngine
    from vocabtp.opsd.parallel import make_layout

    layout = make_layout(SimpleNamespace(tp=tp, device="cpu", shard="none"))
    options = ("parallel.engine=deepspeed", f"parallel.tp={tp}", *overrides)
    config = load_config(path, options).for_world(2)
    return DeepSpeedEngine(net, config, layout, 3)


def step(engine, *losses):
    for i, loss in enumerate(losses):
        engine.backward(loss, last=i == len(losses) - 1)
    return engine.step(0, tokens=1, report=[0.0], own=[])


def flat(net):
    return torch.cat([p.detach().float().reshape(-1) for p in net.parameters()])


def test_no_key_is_known_that_deepspeed_refuses():
    """It says so once the models are loaded, without the line of the key."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from vocabtp.opsd._deepspeed_keys import REFUSALS, SECTIONS

    refused = {item.key for item in REFUSALS}
    for section, theirs in (
        ("bf16", DeepSpeedBF16Config),
        ("zero_optimization", DeepSpeedZeroConfig),
    ):
        fields = theirs.model_fields
        names = {*fields, *(field.alias for field in fields.values() if field.alias)}
        unknown = {key for key in SECTIONS[section] - names if f"{section}.{key}" not in refused}
        assert not unknown, section
        assert names <= SECTIONS[section]


def test_switches_are_booleans_of_deepspeeds_own_classes():
    """Its other keys it reads by truth: "no" would be on."""
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from vocabtp.opsd._deepspeed_booleans import SWITCHES

    classes = {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "compile": CompileConfig,
        "zero_optimization": DeepSpeedZeroConfig,
    }
    assert classes.keys() == SWITCHES.keys()
    for section, names in SWITCHES.items():
        fields = {
            known: field.annotation
            for name, field in classes[section].model_fields.items()
            for known in (name, field.alias)
        }
        assert {fields[name] for name in names} <= {bool, bool | None}, section


def mistyped(rank, world, path):
    from vocabtp.opsd.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        make(path, 1, Net(), "parallel.shard=zero2")
    return str(caught.value)


def test_a_value_that_deepspeed_cannot_read_is_told_with_its_key(ranks, tmp_path):
    path = tiny_run(
        tmp_path,
        training=TRAINING,
        deepspeed_config={"zero_optimization": {"overlap_comm": "perhaps"}},
    )
    for text in ranks(mistyped, 2, path):
        assert "cannot use overlap_comm 'perhaps': Input should be a valid boolean" in text


def scaling(rank, world, path, stage):
    """Two micro-batches on two copies: by DeepSpeed's own division, and by ours."""
    import deepspeed

    shard = f"parallel.shard={stage}"
    net, classic = Net(), Net()
    engine = make(path, 1, net, shard)
    own, *_ = deepspeed.initialize(
        model=classic,
        optimizer=torch.optim.SGD(classic.parameters(), lr=LR),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
        },
    )
    batches = [inputs(2 * rank + i) for i in range(2)]
    for batch in batches:
        own.backward(own(batch))
        own.step()
    # micro_batch_mean: the means, divided by the micro-batches of all copies
    result = step(engine, *(engine.forward(batch) / (2 * world) for batch in batches))
    return flat(net), flat(classic), result.grad_norm


def clipping(rank, world, path, tp, dtype, stage, limit):
    """The update of one step of plain gradient descent, and how long the gradient was."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from vocabtp.opsd.parallel import make_layout

    net = Net(dtype)
    if tp > 1:
        mesh = make_layout(SimpleNamespace(tp=tp, device="cpu", shard="none")).mesh["tp"]
        part = distribute_tensor(net.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        net.weight = nn.Parameter(part)
    engine = make(
        path,
        tp,
        net,
        f"parallel.shard={stage}",
        f"training.max_grad_norm={limit}",
        f"student.dtype={KINDS[dtype]}",
    )
    masters = list(net.parameters())

    def read():
        held = [
            engine.holder.read(p, "master") if "master" in engine.holder.keys(p) else p.detach()
            for p in masters
        ]
        return [value.float().clone() for value in held]

    before = read()
    # equal inputs on all ranks: the bias has one gradient, as whatever ranks hold whole
    dp = world // tp
    result = step(engine, 100 * engine.forward(inputs(7, dtype)) / dp)
    moved = [after - old for after, old in zip(read(), before, strict=True)]
    return moved, result.grad_norm, [p.requires_grad for p in masters]


def adam(rank, world, path):
    """bf16 with ZeRO-0: the first step of AdamW, by DeepSpeed and by hand."""
    net, truth = Net(torch.bfloat16), Net(torch.bfloat16)
    options = ("optimizer=adamw", "adam_eps=1e-3", "weight_decay=0.5")
    overrides = (f"training.{option}" for option in options)
    engine = make(path, 1, net, "student.dtype=bfloat16", *overrides)
    x = inputs(3, torch.bfloat16)
    truth(x).backward()
    masters = [p.detach().float().requires_grad_() for p in truth.parameters()]
    for master, p in zip(masters, truth.parameters(), strict=True):
        master.grad = p.grad.float()
    matrix = {"params": masters[:1], "weight_decay": 0.5}
    bias = {"params": masters[1:], "weight_decay": 0.0}
    torch.optim.AdamW([matrix, bias], lr=LR, eps=1e-3).step()
    step(engine, engine.forward(x) / world)
    return [engine.holder.read(p, "master").clone() for p in net.parameters()], masters


def refused(rank, world, path):
    """DeepSpeed says that it did not step."""
    engine = make(path, 1, Net())
    engine.inner.was_step_applied = lambda: False
    result = step(engine, engine.forward(inputs(0)))
    return result.applied, result.reason


def poisoned(rank, world, path, stage, dtype):
    """A step with NaN on the last rank, one given up, then a good one; beside the good one alone.

    DeepSpeed by itself would take the bad one: it looks for overflows in fp16 only.
    """
    nets = [Net(dtype), Net(dtype)]
    options = (f"parallel.shard={stage}", f"student.dtype={KINDS[dtype]}")
    engines = [make(path, 1, net, *options) for net in nets]
    before = flat(nets[0])
    bad = float("nan") if rank == world - 1 else 1.0
    good = engines[0].forward(inputs(1, dtype))
    result = step(engines[0], good, engines[0].forward(inputs(2, dtype)) * bad)
    untouched = before.equal(flat(nets[0]))
    engines[0].backward(engines[0].forward(inputs(4, dtype)), last=False)
    engines[0].zero_grad()
    for engine in engines:
        step(engine, engine.forward(inputs(3 + rank, dtype)))
    return result.applied, result.reason, untouched, flat(nets[0]).equal(flat(nets[1]))


def together(rank, world, path):
    """All of it in one process: engines with and without tensor parallelism follow each other."""
    none, zero2 = "none", "zero2"
    half, single = torch.bfloat16, torch.float32
    return {
        "clipping": {
            case: clipping(rank, world, path, *case)
            for case in [
                (2, half, none, 0.5),
                (2, single, zero2, 0.5),
                (1, single, none, 0),
                (1, single, zero2, 0),
                (1, half, zero2, 0.5),
            ]
        },
        "scaling": [scaling(rank, world, path, stage) for stage in (none, zero2)],
        "adam": adam(rank, world, path),
        "refused": refused(rank, world, path),
        "poisoned": [
            poisoned(rank, world, path, *case)
            for case in [(none, single), (zero2, single), (none, half), (zero2, half)]
        ],
    }


def test_what_deepspeed_would_do_by_itself(ranks, tmp_path):
    path = tiny_run(tmp_path / "run", training=TRAINING)
    results = ranks(together, 2, path)
    for result in results:
        for mine, classic, norm in result["scaling"]:
            torch.testing.assert_close(mine, classic)
            assert norm > 0
        mine, truth = result["adam"]
        torch.testing.assert_close(mine, truth)
        assert result["refused"] == (False, "DeepSpeed skipped it")
        for applied, reason, untouched, same in result["poisoned"]:
            assert not applied
            assert reason.startswith("the gradient norm is not finite: first in the gradient of ")
            assert untouched
            assert same
    for case in results[0]["clipping"]:
        tp, dtype, _, limit = case
        (moved, norm, _), (other, second, _) = (r["clipping"][case] for r in results)
        parts = [*moved, *(other[:1] if tp > 1 else [])]  # the weight is cut, the bias is whole
        length = float(torch.cat([part.reshape(-1) for part in parts]).norm())
        assert norm == second > 10
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert length == pytest.approx(LR * (limit or norm), rel=tolerance)
