"""DeepSpeed on an accelerator: its engine takes the updates of the torch engine."""

import json

import pytest
import torch

from tiny_run import recorded, tiny_run
from train_agreement import fixed_pick

pytestmark = [pytest.mark.gpu, pytest.mark.deepspeed]

ENGINE, ZERO2 = "parallel.engine=deepspeed", "parallel.shard=zero2"
KEPT = ("losses", "metrics", "applied", "answers", "optimizer", "weights")


def runs(rank, world, root, device, dtype, variants):
    """What each variant of one configuration came to, on the host."""
    import vocabtp.opsd.rollout as rollout_module

    rollout_module._Picker.pick = fixed_pick
    path = tiny_run(
        root / dtype,
        tied=True,
        prompts=9,
        model={"num_hidden_layers": 2},
        parallel={"device": device},
        student={"dtype": dtype},
        teacher={"dtype": dtype},
        training={
            "max_steps": -1,
            "micro_batch_size_per_gpu": 1,
            "max_grad_norm": 0.05,
            "weight_decay": 0.1,
            "save_steps": 2,
        },
    )
    out = []
    for name, *options in variants:
        folder = root / dtype / name
        last = folder / "checkpoints" / "step-00000003"
        if last.exists():
            # as if the writer of the last checkpoint had been killed
            last.rename(last.with_name(last.name + ".partial"))
        run = recorded(path, f"training.save_dir={folder}", *options)
        on_device = {w.device.type for w in run["weights"].values()}
        kept = {key: run[key] for key in KEPT}
        for key in ("optimizer", "weights"):
            kept[key] = {n: value.cpu() for n, value in kept[key].items()}
        out.append(kept | {"on": on_device})
    return out


def norms(run):
    return [step["grad_norm"] for step in run["metrics"]]


# stage 0 adds the gradients of a step's micro-batches up in bfloat16, stage 2 in float32
TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (4e-2, 1e-2)}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_losses_and_gradient_norms_are_those_of_the_torch_engine(ranks, tmp_path, dtype):
    """ZeRO-0 and 2, clipped updates of unequal micro-batches; and resumed bit for bit."""
    device = torch.accelerator.current_accelerator().type
    stage1 = tmp_path / "stage1.json"
    stage1.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    variants = [
        ("torch",),
        ("zero0", ENGINE),
        ("zero2", ENGINE, ZERO2),
        ("zero2", ENGINE, ZERO2),
        ("zero1", ENGINE, f"deepspeed_config={stage1}"),
    ]
    [found] = ranks(runs, 1, tmp_path, device, dtype, variants, limit=200, device=device)
    truth, zero0, zero2, again, zero1 = found
    coarse, fine = TOLERANCES[dtype]
    assert all(norm > 0.05 for norm in norms(truth))
    assert len({len(answer) for _, _, answer in truth["answers"]}) > 3
    for run, rel in ((zero0, coarse), (zero2, fine), (zero1, coarse)):
        assert run["on"] == {device}
        assert run["answers"] == truth["answers"]
        assert run["applied"] == [True] * 3
        assert run["losses"] == pytest.approx(truth["losses"], rel=rel)
        assert norms(run) == pytest.approx(norms(truth), rel=rel)
        assert run["optimizer"].keys() == truth["optimizer"].keys()
        for name, value in truth["optimizer"].items():
            if name.endswith(".step"):
                assert run["optimizer"][name] == value == 3
            elif name.endswith(".master"):
                assert run["optimizer"][name].dtype == torch.float32
    assert again["losses"] == zero2["losses"][2:]
    for key in ("weights", "optimizer"):
        for name, value in zero2[key].items():
            assert torch.equal(again[key][name], value)


def test_a_partitioned_teacher_gives_the_losses_of_a_whole_one(ranks, tmp_path):
    device = torch.accelerator.current_accelerator().type
    variants = [("whole", ENGINE), ("zero3", ENGINE, "parallel.teacher_shard=zero3")]
    [found] = ranks(runs, 1, tmp_path, device, "bfloat16", variants, limit=200, device=device)
    whole, zero3 = found
    assert zero3["applied"] == [True] * 3
    assert zero3["losses"] == pytest.approx(whole["losses"], rel=1e-5)
