"""Models sharded over the data-parallel ranks take the updates of one dense process."""

import pytest
import torch

from tiny_run import recorded
from train_agreement import (
    CLIP,
    MODEL,
    STEPS,
    agrees,
    close,
    exported,
    full_context,
    same,
    small_run,
    varied,
)

UNITS = 3  # of FSDP: the layers, and the rest
CHECKPOINTED = "training.activation_checkpointing=true"
OFFLOADED = "teacher.offload_to_cpu=true"
KEPT = ("losses", "metrics", "weights", "teacher", "optimizer", "answers", "tied")


def counted(calls):
    """Count what FSDP sends; it sends nothing while answers are sampled."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module

    import vocabtp.opsd.step as step_module

    def count(name, original):
        def call(*args, **options):
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **options)

        setattr(group_module, name, call)

    for name in ("foreach_all_gather", "foreach_reduce"):
        count(name, getattr(group_module, name))
    rollouts = step_module.Stepper._rollouts

    def watched(*args, **options):
        before = dict(calls)
        out = rollouts(*args, **options)
        assert calls == before
        return out

    step_module.Stepper._rollouts = watched


def runs(rank, world, target, variants):
    """Each run, from its first step or again from the checkpoint in its middle."""
    from vocabtp.opsd.config import load_config
    from vocabtp.opsd.trainer import Trainer

    out, calls = [], {}
    counted(calls)
    for path, name, mode, *overrides in variants:
        if rank == 0 and mode == "again":
            # as if the writer of the last checkpoint had been killed
            last = target / name / "checkpoints" / "step-00000003"
            last.rename(last.with_name(last.name + ".partial"))
        torch.distributed.barrier()
        calls.clear()
        options = (f"training.save_dir={target / name}", *overrides)
        run = recorded(path, *options)
        out.append({key: run[key] for key in KEPT} | {"calls": dict(calls)})
        after = run["result"].after
        out[-1]["evaluation"] = None if after is None else after.numbers()
        if mode == "export":
            Trainer(load_config(path, options)).export(target / name / "exported")
    return out


def test_two_copies_share_one_model(ranks, tmp_path):
    """Tied weights, clipping, micro-batches, unequal work, and a copy without any token."""
    path, empty = small_run(tmp_path / "a"), full_context(tmp_path / "b")
    truth = varied(recorded(path, f"training.save_dir={tmp_path / 'single'}"))
    nothing = recorded(empty, f"training.save_dir={tmp_path / 'nothing'}")
    assert all(step["grad_norm"] > CLIP for step in truth["metrics"])
    assert len({len(answer) for _, _, answer in truth["answers"]}) > 2
    variants = [
        (path, "zero2", "once", "parallel.shard=zero2"),
        (path, "zero3", "export", "parallel.shard=zero3"),
        (empty, "empty", "once", "parallel.shard=zero3"),
        (path, "layers", "once", "parallel.shard=zero3", CHECKPOINTED, OFFLOADED),
    ]
    results = ranks(runs, 2, tmp_path, variants)
    for zero2, zero3, none, layers in results:
        for run in (zero2, zero3):
            agrees(run, truth)
            assert run["tied"]
            assert same(run["teacher"], truth["teacher"])
            assert run["evaluation"] == pytest.approx(truth["result"].after.numbers(), rel=2e-5)
            # once a step, whatever the micro-batches
            assert run["calls"]["foreach_reduce"] == UNITS * STEPS
        # layers that run again gather nothing again
        assert layers["calls"] == zero3["calls"]
        assert same(layers["weights"], zero3["weights"])
        agrees(none, nothing)
        assert [step["empty_responses"] for step in none["metrics"]] == [1, 1]
        # zero3 gathers each layer a second time for a backward, zero2 once for all of a step's
        gathers = [run["calls"]["foreach_all_gather"] for run in (zero2, zero3)]
        micro_batches = 2 + 2 + 1
        assert gathers[1] - gathers[0] == (
            UNITS * (micro_batches - STEPS) + (UNITS - 1) * micro_batches
        )
    model = exported(tmp_path / "zero3" / "exported")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same(dict(model.named_parameters()), results[0][1]["weights"])


def test_two_by_two_ranks_and_resume(ranks, tmp_path):
    """On top of tensor parallelism; resumed bit for bit, and by one dense process."""
    path = small_run(tmp_path / "run", training={"save_steps": 2})
    truth = varied(recorded(path, f"training.save_dir={tmp_path / 'single'}"))
    layout = ("parallel.tp=2", "parallel.shard=zero3")
    other = ("parallel.tp=2", "parallel.shard=zero2", CHECKPOINTED)
    variants = [
        (path, "out", "export", *layout),
        (path, "out", "again", *layout),
        (path, "out", "again", *other),
    ]
    results = ranks(runs, 4, tmp_path, variants, limit=120)
    for straight, again, zero2 in results:
        agrees(straight, truth)
        assert again["losses"] == straight["losses"][2:]
        assert same(again["weights"], straight["weights"])
        assert same(again["optimizer"], straight["optimizer"])
        assert zero2["losses"] == pytest.approx(truth["losses"][2:], rel=2e-5)
        close(zero2["weights"], truth["weights"])
    model = exported(tmp_path / "out" / "exported")
    assert same(dict(model.named_parameters()), results[0][0]["weights"])
    last = tmp_path / "out" / "checkpoints" / "step-00000003"
    last.rename(last.with_name(last.name + ".partial"))
    alone = recorded(path, f"training.save_dir={tmp_path / 'out'}")
    assert alone["losses"] == pytest.approx(truth["losses"][2:], rel=2e-5)
    close(alone["weights"], truth["weights"])


def test_bf16_students_keep_fp32_masters(ranks, tmp_path):
    """As whole replicas do, bit for bit; and each reads what the other has written."""
    path = small_run(
        tmp_path / "run",
        training={"save_steps": 2, "max_grad_norm": 0},
        student={"dtype": "bfloat16"},
        teacher={"dtype": "bfloat16"},
    )
    variants = [
        (path, "none", "once", "parallel.shard=none"),
        (path, "zero3", "export", "parallel.shard=zero3"),
        (path, "none", "again", "parallel.shard=zero2"),
        (path, "zero3", "again", "parallel.shard=none"),
    ]
    results = ranks(runs, 2, tmp_path, variants, limit=120)
    for none, zero3, from_none, from_zero3 in results:
        assert zero3["losses"] == none["losses"]
        assert same(zero3["optimizer"], none["optimizer"])
        assert {w.dtype for w in zero3["weights"].values()} == {torch.float32}
        for run in (from_none, from_zero3):
            assert run["losses"] == none["losses"][2:]
            assert same(run["optimizer"], none["optimizer"])
    model = exported(tmp_path / "zero3" / "exported")
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert same(dict(model.named_parameters()), results[0][0]["weights"])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_and_layout(ranks, tmp_path, kind, tied):
    attention = {"attention": "eager"} if kind == "gemma2" else {}
    # no dropout: its noise is another one on each data-parallel copy
    model = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = MODEL | (model if kind == "gpt2" else {})
    path = small_run(tmp_path / "run", kind=kind, tied=tied, training=attention, model=model)
    truth = varied(recorded(path, f"training.save_dir={tmp_path / 'single'}"))
    for world, tp in ((2, 1), (2, 2), (4, 2), (4, 1)):
        variants = [
            (path, f"{zero}-{tp}-{world}", "export", f"parallel.shard={zero}", f"parallel.tp={tp}")
            for zero in ("none", "zero2", "zero3")
        ]
        results = ranks(runs, world, tmp_path, variants, limit=240)
        for peer in results:
            for run in peer:
                agrees(run, truth)
        for (_, name, *_), run in zip(variants, results[0], strict=True):
            model = exported(tmp_path / name / "exported")
            assert same(dict(model.named_parameters()), run["weights"])


def compiled(rank, world, target, variants):
    """`runs` with layers compiled without C++, and how often."""
    from functools import partial

    from torch._dynamo.testing import CompileCounterWithBackend

    import vocabtp.opsd.loading as loading_module

    counter = CompileCounterWithBackend("aot_eager")
    loading_module.compile_layers = partial(loading_module.compile_layers, backend=counter)
    return runs(rank, world, target, variants), counter.frame_count


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "layout",
    [["parallel.tp=2"], ["parallel.shard=zero3"], ["parallel.tp=2", "parallel.shard=zero3"]],
)
def test_compiled_layers_of_several_ranks(ranks, tmp_path, layout):
    """Cut or sharded weights inside of what is compiled, in layers that run again."""
    path = small_run(tmp_path / "run", kind="qwen3")
    truth = varied(recorded(path, f"training.save_dir={tmp_path / 'single'}"))
    variants = [(path, "compiled", "once", *layout, "training.compile=true", CHECKPOINTED)]
    for [run], compilations in ranks(compiled, 2 * len(layout), tmp_path, variants, limit=300):
        assert 2 <= compilations <= 8
        agrees(run, truth)
