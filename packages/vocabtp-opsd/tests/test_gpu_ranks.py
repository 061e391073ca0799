"""Two accelerators, through NCCL: every layout takes the updates of one of them.

The same runs as in the agreement table of tests-integration, which has CPU ranks; with --full they
run on the CPU here too.
"""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tiny_run import recorded
from train_agreement import (
    MODEL,
    STEPS,
    agrees,
    close,
    exported,
    fixed_pick,
    same,
    small_run,
    varied,
)

# ends all ranks, with their stacks
LIMIT = 120
ENGINE, ZERO2 = "parallel.engine=deepspeed", "parallel.shard=zero2"
ZERO3, TP = "parallel.shard=zero3", "parallel.tp=2"
OFFLOADED = "teacher.offload_to_cpu=true"
KEPT = ("losses", "metrics", "applied", "answers", "changed", "teacher_stored")
TENSORS = ("weights", "teacher")

LAYOUTS = {
    "zero2": [ZERO2],
    "zero3": [ZERO3],
    "zero3-offloaded": [ZERO3, OFFLOADED],
    "tp": [TP],
    "tp-hidden": [TP, "teacher.payload=hidden", OFFLOADED],
    "deepspeed": [ENGINE, ZERO2],
    "deepspeed-zero3-teacher": [ENGINE, ZERO2, "parallel.teacher_shard=zero3"],
    "deepspeed-autotp": [ENGINE, ZERO2, TP, "parallel.tp_by=autotp"],
}
# partitions also the smallest weights
ALL_PARTS = {"stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}


def layouts(*names):
    return [
        pytest.param(name, marks=[pytest.mark.deepspeed] if "deepspeed" in name else [])
        for name in names
    ]


DEVICES = [
    pytest.param("cpu", marks=pytest.mark.full),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request):
    """Where a run is: "cpu", or the kind of accelerator."""
    if request.param == "cpu":
        return "cpu"
    found = torch.accelerator.current_accelerator()
    assert found is not None, "the gpu tests need an accelerator"
    return found.type


@pytest.fixture
def start(ranks, device):
    """Call a function on ranks, each on a device of its own."""

    def call(fn, world, *args):
        if device == "cpu":
            return ranks(fn, world, *args, limit=LIMIT)
        there = torch.accelerator.device_count()
        if there < world:
            pytest.skip(f"{world} ranks want a device each, and there is {there} {device}")
        return ranks(fn, world, *args, limit=LIMIT, device=device, hosts=True)

    return call


def on_host(named):
    return {name: tensor.cpu() for name, tensor in named.items()}


def told(run):
    """What of a run can be compared, on the host, and where its weights were."""
    found = {key: run[key] for key in KEPT} | {key: on_host(run[key]) for key in TENSORS}
    for key in TENSORS:
        found[f"{key} on"] = {tensor.device for tensor in run[key].values()}
    return found


def trained(rank, world, path, folder, fixed, options):
    """A run, exported; with `fixed` answers where those of the weights could differ."""
    import vocabtp.opsd.rollout as rollout_module
    from vocabtp.opsd.config import load_config
    from vocabtp.opsd.trainer import Trainer

    if fixed:
        rollout_module._Picker.pick = fixed_pick
    options = (f"training.save_dir={folder}", *options)
    found = told(recorded(path, *options))
    Trainer(load_config(path, options)).export(folder / "exported")
    return found


def check_places(peers, device):
    """Each rank trained on a device of its own, to the last step."""
    for rank, run in enumerate(peers):
        place = torch.device("cpu") if device == "cpu" else torch.device(device, rank)
        assert run["weights on"] == {place}
        assert run["applied"] == [True] * STEPS


@pytest.mark.parametrize("layout", layouts(*LAYOUTS))
def test_two_devices_take_the_updates_of_one(start, tmp_path, device, layout):
    """Tied weights, clipping, micro-batches, a copy without any token in the last step.

    On accelerators to 1e-4 instead of 2e-5 and 1e-5: their products of matrices add in an order of
    their own for each shape, and half a model has other shapes. TF32 is off, as torch has it.
    """
    assert not torch.backends.cuda.matmul.allow_tf32
    path = small_run(tmp_path / "run", held_out=0, parallel={"device": device})
    options = list(LAYOUTS[layout])
    if layout == "deepspeed-zero3-teacher":
        file = tmp_path / "deepspeed.json"
        file.write_text(json.dumps({"zero_optimization": ALL_PARTS}))
        options.append(f"deepspeed_config={file}")
    peers = start(trained, 2, path, tmp_path / "two", False, options)
    truth = varied(told(recorded(path, f"training.save_dir={tmp_path / 'one'}")))
    check_places(peers, device)
    for run in peers:
        if device == "cpu":
            agrees(run, truth)
        else:
            agrees(run, truth, 1e-4, rtol=1e-4, atol=1e-5)
        assert same(run["teacher"], truth["teacher"])
        if layout == "deepspeed-zero3-teacher":
            # nothing whole is left
            assert run["teacher_stored"][0] == 0
    model = exported(tmp_path / "two" / "exported")
    assert same(dict(model.named_parameters()), peers[0]["weights"])


# of losses and of gradient norms: of shards, and of half the heads and units on each rank, whose
# sums are rounded apart; on the CPU they are 0, and 0.006 and 0.02
BF16 = {"zero3": (1e-2, 1e-2), "tp": (4e-2, 1e-1), "deepspeed": (1e-2, 1e-2)}


def near(run, truth, losses, norms):
    """The steps of one process in bfloat16, with the same answers."""
    answers = {(step, sample): answer for step, sample, answer in truth["answers"]}
    assert len(set(map(len, answers.values()))) > 3
    assert all(answers[step, sample] == answer for step, sample, answer in run["answers"])
    assert run["losses"] == pytest.approx(truth["losses"], rel=losses)
    found, wanted = ([step["grad_norm"] for step in r["metrics"]] for r in (run, truth))
    assert found == pytest.approx(wanted, rel=norms)


@pytest.mark.parametrize("layout", layouts(*BF16))
def test_two_devices_in_bfloat16(start, tmp_path, device, layout):
    path = small_run(
        tmp_path / "run",
        held_out=0,
        parallel={"device": device},
        student={"dtype": "bfloat16"},
        teacher={"dtype": "bfloat16"},
    )
    peers = start(trained, 2, path, tmp_path / "two", True, LAYOUTS[layout])
    [truth] = start(trained, 1, path, tmp_path / "one", True, [])
    check_places(peers, device)
    for run in peers:
        near(run, truth, *BF16[layout])
    one, two = (exported(tmp_path / name / "exported") for name in ("one", "two"))
    assert two.dtype == torch.bfloat16
    # a weight may be rounded to the next number, up to 1/128 away
    close(dict(two.named_parameters()), dict(one.named_parameters()), rtol=1e-2, atol=2e-3)


ROUTED = {
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "intermediate_size": 32},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
}


@pytest.mark.parametrize("kind", sorted(ROUTED))
@pytest.mark.parametrize("options", [[OFFLOADED], [ZERO3, OFFLOADED]], ids=["one", "zero3"])
def test_weights_kept_in_fp32_beside_a_teacher_on_the_host(start, tmp_path, device, kind, options):
    """Routers of experts: one model lists them, one makes them so."""
    # rows of 16 bytes, or CUDA has no grouped products of them
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    path = small_run(
        tmp_path / "run",
        kind=kind,
        held_out=0,
        model=MODEL | sizes | {"moe_intermediate_size": 16} | ROUTED[kind],
        parallel={"device": device},
        student={"dtype": "bfloat16"},
        teacher={"dtype": "bfloat16"},
    )
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / role, dtype=torch.bfloat16)
        for role in ("student", "teacher")
    )
    kept = {name for name, p in student.named_parameters() if p.dtype == torch.float32}
    assert 2 <= len(kept) <= 4
    world = 2 if ZERO3 in options else 1
    peers = start(trained, world, path, tmp_path / "two", True, options)
    [truth] = start(trained, 1, path, tmp_path / "one", True, [])
    check_places(peers, device)
    for run in peers:
        # a router may send a token elsewhere for the last bit of a weight
        near(run, truth, 3e-2, 1e-1)
        assert same(run["teacher"], dict(teacher.named_parameters()))
        if world == 1:
            assert run["teacher on"] == {torch.device("cpu")}
    moved, before = set(), dict(student.named_parameters())
    with safe_open(tmp_path / "two" / "exported" / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            tensor = file.get_tensor(name)
            if name in kept and before[name].requires_grad:
                # in numbers that bfloat16 has not
                assert tensor.dtype == torch.float32
                assert not tensor.equal(tensor.bfloat16().float())
                assert not tensor.equal(before[name])
                moved.add(name)
            elif name in before and name not in kept:
                assert tensor.dtype == torch.bfloat16
    assert len(moved) == 2
