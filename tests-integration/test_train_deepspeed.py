"""The DeepSpeed engine takes the updates of one dense process of the torch engine."""

import json

import pytest
import torch

from tiny_run import recorded
from train_agreement import (
    CLIP,
    STEPS,
    agrees,
    close,
    exported,
    full_context,
    same,
    small_run,
    varied,
)

KEPT = ("losses", "metrics", "weights", "teacher", "optimizer", "answers", "tied", "applied")
ENGINE, AUTOTP = "parallel.engine=deepspeed", "parallel.tp_by=autotp"


def runs(rank, world, target, variants):
    """Each run, from its first step or again from the checkpoint in its middle."""
    from vocabtp.opsd.config import load_config
    from vocabtp.opsd.trainer import Trainer

    out = []
    for path, name, mode, *overrides in variants:
        if rank == 0 and mode == "again":
            # as if the writer of the last checkpoint had been killed
            last = target / name / "checkpoints" / "step-00000003"
            last.rename(last.with_name(last.name + ".partial"))
        torch.distributed.barrier()
        options = (f"training.save_dir={target / name}", *overrides)
        run = recorded(path, *options)
        out.append({key: run[key] for key in KEPT})
        out[-1] |= {key: run[f"teacher_{key}"] for key in ("stored", "kept")}
        after = run["result"].after
        out[-1]["evaluation"] = None if after is None else after.numbers()
        if mode == "export":
            trainer = Trainer(load_config(path, options))
            out[-1]["check"] = trainer.check()
            out[-1]["shards"] = [
                bounds(trainer.models.student),
                bounds(trainer.models.teacher.model),
            ]
            # from under the engine that the check has made
            trainer.export(target / name / "exported")
    return out


def bounds(model):
    return model.shard.start, model.shard.end, model.shard.global_size


def once_each(peers, i):
    """The optimizer entries of run `i`: each data-parallel copy keeps some of them."""
    out = {}
    for peer in peers:
        out |= peer[i]["optimizer"]
    return out


def gather_all(root, **zero):
    """DeepSpeed's JSON that partitions also the smallest weights, as an override."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / f"deepspeed{len(zero)}.json"
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}
    file.write_text(json.dumps({"zero_optimization": zero}))
    return f"deepspeed_config={file}"


ZERO2, TEACHER3 = "parallel.shard=zero2", "parallel.teacher_shard=zero3"


def test_two_copies(ranks, tmp_path, monkeypatch):
    """Tied weights, clipping, micro-batches, unequal work, and a copy without any token."""
    # nothing is compiled: a machine without a compiler runs this
    extensions = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    path, empty = small_run(tmp_path / "a"), full_context(tmp_path / "b")
    truth = varied(recorded(path, f"training.save_dir={tmp_path / 'single'}"))
    nothing = recorded(empty, f"training.save_dir={tmp_path / 'nothing'}")
    assert all(step["grad_norm"] > CLIP for step in truth["metrics"])
    small = gather_all(tmp_path)
    variants = [
        (path, "zero0", "once", ENGINE, TEACHER3, small, "teacher.payload=hidden"),
        (path, "zero2", "export", ENGINE, ZERO2, "training.activation_checkpointing=true"),
        (empty, "empty", "once", ENGINE, TEACHER3, gather_all(tmp_path, stage=1)),
    ]
    results = ranks(runs, 2, tmp_path, variants, limit=120)
    for zero0, zero2, none in results:
        for run in (zero0, zero2):
            agrees(run, truth)
            assert run["tied"]
            assert run["applied"] == [True] * STEPS
            assert same(run["teacher"], truth["teacher"])
            assert run["evaluation"] == pytest.approx(truth["result"].after.numbers(), rel=2e-5)
        # all of the teacher, or this rank's half and what DeepSpeed fills up with
        whole, _ = truth["teacher_stored"]
        assert zero2["stored"] == [whole, whole]
        assert zero0["stored"][0] == 0
        assert zero0["stored"][1] < 0.6 * whole
        agrees(none, nothing)
        assert [step["empty_responses"] for step in none["metrics"]] == [1, 1]
    for i in range(2):
        close(once_each(results, i), truth["optimizer"])
    model = exported(tmp_path / "zero2" / "exported")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same(dict(model.named_parameters()), results[0][1]["weights"])
    assert not extensions.exists()


def test_two_tensor_parallel_ranks_and_resume(ranks, tmp_path):
    """Bounds as they were cut, norms of query and key; in new processes, and by either engine."""
    path = small_run(tmp_path / "run", kind="qwen3", tied=False, training={"save_steps": 2})
    truth = varied(recorded(path, f"training.save_dir={tmp_path / 'single'}"))
    layout = (ENGINE, "parallel.tp=2")
    options = (*layout, ZERO2, "training.async_save=true")
    cut = (*layout, ZERO2, AUTOTP)
    variants = [(path, "out", "export", *options), (path, "cut", "once", *cut)]
    first = ranks(runs, 2, tmp_path, variants)
    for peer in first:
        for run in peer:
            agrees(run, truth)
            assert not run["tied"]
    model = exported(tmp_path / "out" / "exported")
    assert same(dict(model.named_parameters()), first[0][0]["weights"])
    weights = sum(p.numel() for p in model.parameters())
    for run, _ in first:
        assert run["check"]["student_parameters"] == weights
        assert run["check"]["optimizer_tensors"] == len(truth["weights"])
        assert run["check"]["resume"].endswith("step-00000003")
    variants = [
        (path, "out", "again", *layout, ZERO2),
        (path, "cut", "again", *cut),
        (path, "out", "again", *layout),
        (path, "out", "again", ENGINE, ZERO2),
        (path, "out", "again", "parallel.tp=2"),
    ]
    results = ranks(runs, 2, tmp_path, variants, limit=120)
    for peer in results:
        for run in peer:
            assert run["losses"] == pytest.approx(truth["losses"][2:], rel=2e-5)
            close(run["weights"], truth["weights"])
        for run, before in zip(peer, first[0], strict=False):
            assert run["losses"] == before["losses"][2:]
            assert same(run["weights"], before["weights"])
            assert same(run["optimizer"], before["optimizer"])


@pytest.mark.parametrize("again", ["autotp", pytest.param("torch", marks=pytest.mark.full)])
def test_autotp(ranks, tmp_path, again):
    """DeepSpeed's own parts, which are not torch's; either engine goes on with them."""
    path = small_run(tmp_path / "run", kind="qwen3", held_out=0, training={"save_steps": 2})
    truth = recorded(path, f"training.save_dir={tmp_path / 'single'}")
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"tensor_parallel": {"autotp_size": 3}}))
    options = (ENGINE, f"deepspeed_config={file}", ZERO2, "teacher.payload=hidden")
    variants = [
        (path, "out", "export", *options, "training.activation_checkpointing=true"),
        (path, "out", "again", *(options if again == "autotp" else ["parallel.tp=3"])),
    ]
    weights = sum(weight.numel() for weight in truth["weights"].values())
    results = ranks(runs, 3, tmp_path, variants, limit=120)
    for (run, resumed), ends in zip(results, [(0, 13), (13, 25), (25, 37)], strict=True):
        agrees(run, truth)
        assert run["tied"]
        assert same(run["teacher"], truth["teacher"])
        assert run["shards"] == [(*ends, 37)] * 2
        assert run["check"]["student_parameters"] == weights
        assert resumed["losses"] == pytest.approx(truth["losses"][2:], rel=2e-5)
        close(resumed["weights"], truth["weights"])
        for part in (run, resumed):
            close(part["optimizer"], truth["optimizer"])
    model = exported(tmp_path / "out" / "exported")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same(dict(model.named_parameters()), results[0][0]["weights"])


def test_bf16(ranks, tmp_path):
    """Masters in fp32, no step counted before the first, as many steps as the torch engine."""
    path = small_run(
        tmp_path / "run",
        held_out=0,
        # as many bits as bfloat16 has would turn a greedy token after the first update
        rollout={"temperature": 1.0},
        training={"max_grad_norm": 0, "weight_decay": 0.1},
        student={"dtype": "bfloat16"},
        teacher={"dtype": "bfloat16"},
    )
    variants = [
        (path, "torch", "once"),
        (path, "zero0", "once", ENGINE),
        (path, "zero2", "export", ENGINE, ZERO2),
    ]
    results = ranks(runs, 2, tmp_path, variants, limit=120)
    truth, *others = (run["losses"] for run in results[0])
    state = results[0][0]["optimizer"]
    for i, losses in enumerate(others, start=1):
        # gradients of the micro-batches add up in bf16 with stage 0, in fp32 with stage 2
        assert losses == pytest.approx(truth, rel=2e-2 if i == 1 else 1e-3)
        mine = once_each(results, i)
        assert mine.keys() == state.keys()
        for name, value in state.items():
            assert mine[name].dtype == torch.float32
            if name.endswith(".step"):
                assert mine[name] == value == STEPS
            elif name.endswith(".master"):
                torch.testing.assert_close(mine[name], value, rtol=2e-2, atol=2e-3)
    model = exported(tmp_path / "zero2" / "exported")
    assert model.dtype == torch.bfloat16


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_and_layout(ranks, tmp_path, kind, tied):
    path = small_run(tmp_path / "run", kind=kind, tied=tied)
    truth = varied(recorded(path, f"training.save_dir={tmp_path / 'single'}"))
    small = gather_all(tmp_path)
    layouts = [(1, 1, "plan"), (2, 1, "plan")]
    layouts += [(world, 2, by) for world in (2, 4) for by in ("plan", "autotp")]
    for world, tp, by in layouts:
        variants = [
            (
                *(path, f"{stage}-{teacher}-{tp}-{by}-{world}", "export"),
                *(ENGINE, f"parallel.tp={tp}", f"parallel.tp_by={by}", small),
                *(f"parallel.shard={stage}", f"parallel.teacher_shard={teacher}"),
            )
            for stage in ("none", "zero2")
            for teacher in ("none", "zero3")
        ]
        results = ranks(runs, world, tmp_path, variants, limit=240)
        for peer in results:
            for run in peer:
                agrees(run, truth)
                assert same(run["teacher"], truth["teacher"])
                assert run["kept"] == []
        for (_, name, *_), run in zip(variants, results[0], strict=True):
            model = exported(tmp_path / name / "exported")
            assert same(dict(model.named_parameters()), run["weights"])
            weights = sum(p.numel() for p in model.parameters())
            for role in ("student", "teacher"):
                assert run["check"][f"{role}_parameters"] == weights
