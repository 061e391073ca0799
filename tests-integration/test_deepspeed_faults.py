"""What the torch engine's runs do about numbers, memory and disks, with the DeepSpeed engine."""

import json

import pytest
import torch

from faulty_ranks import bad_numbers, full_disk
from tiny_run import recorded, tiny_run

ENGINE, ZERO2 = "parallel.engine=deepspeed", "parallel.shard=zero2"
# the second prompt of the last rank: of all four of a step, or of its copy's two
LAYOUTS = {"parallel.tp=2": 2, "parallel.tp=1": 4}
# gradients that the ranks keep whole, or only a part of
STAGES = {"parallel.tp=2": (ENGINE,), "parallel.tp=1": (ENGINE, ZERO2)}
# whole on all tensor-parallel ranks, and cut over them
NORM, MATRIX = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
FAULTS = {1: "row", 3: NORM, 4: MATRIX}
BAD_NORM = "the gradient norm is not finite: first in the gradient of"


def skipped(rank, world, path, variants):
    """Runs that too many bad steps end, and the same from their last checkpoint to the end."""
    more = "training.max_skipped_steps=3"
    return [
        [bad_numbers(rank, world, path, FAULTS, (*options, *end)) for end in ((), (more,))]
        for options in variants
    ]


def test_bad_numbers_are_skipped_named_and_end_the_run_as_with_the_torch_engine(ranks, tmp_path):
    training = {"max_steps": 6, "micro_batch_size_per_gpu": 1, "save_steps": 2}
    path = tiny_run(
        tmp_path,
        data={"shuffle": False},
        rollout={"temperature": 1.0, "max_response_length": 3},
        training=training | {"max_skipped_steps": 2},
    )
    runs = [(layout, engine) for layout in LAYOUTS for engine in ("torch", "deepspeed")]
    folders = [tmp_path / f"{layout}-{engine}" for layout, engine in runs]
    variants = [
        (layout, *(STAGES[layout] if engine == "deepspeed" else ()), f"training.save_dir={folder}")
        for (layout, engine), folder in zip(runs, folders, strict=True)
    ]
    first, last = ranks(skipped, 2, path, variants, limit=120)
    assert first == last
    numbers = {}
    for (layout, engine), folder, found in zip(runs, folders, first, strict=True):
        (step, words), (applied, reasons, moved) = found
        assert step == 4
        start = "2 steps in a row were skipped, the last one, step 5, because"
        assert words.startswith(f"{start} {BAD_NORM} {MATRIX} on rank ")
        # elsewhere the sum over the copies has taken it to both
        assert "on rank 1; " in words or layout != "parallel.tp=2"
        assert "training.max_skipped_steps (2)" in words
        # from the checkpoint of the fourth step
        assert applied == moved == [False, True]
        assert reasons[0] in words
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 2, 3, 3]
        because = [row.get("skipped_because", "") for row in rows]
        assert because[1].startswith("the loss is not finite: first at ")
        assert because[1].endswith(f"train.jsonl:{4 + LAYOUTS[layout]}, sample 0, response token 1")
        assert because[3].startswith(f"{BAD_NORM} {NORM} on rank ")
        # what a skipped step would leave behind is in the numbers of those after it
        numbers[layout, engine] = [row["loss"] for row in rows if row["step"] != 2]
        numbers[layout, engine] += [row["grad_norm"] for row in rows if row["applied"]]
        assert len(numbers[layout, engine]) == 5 + 3
        assert numbers[layout, engine] == pytest.approx(numbers[layout, "torch"], rel=2e-5)


def full_then_not(rank, world, path, target, cases):
    """A full disk, what it leaves, the run that goes on from there, and one without a fault."""
    out = []
    for i, (what, *options) in enumerate(cases):
        options = (ENGINE, *options, f"training.save_dir={target / str(i)}")
        said = full_disk(rank, world, path, what, options)
        root = target / str(i) / "checkpoints"
        left = sorted(p.name for p in root.iterdir()) if rank == 0 else None
        again = recorded(path, *options)
        straight = recorded(path, *options, f"training.save_dir={target / f'{i}-whole'}")
        same = all(again["weights"][k].equal(v) for k, v in straight["weights"].items())
        out.append((said, left, again["losses"] == straight["losses"][1:], same))
    return out


def test_a_full_disk_leaves_the_checkpoint_before_and_all_ranks_say_so(ranks, tmp_path):
    path = tiny_run(tmp_path, training={"max_steps": 2, "save_steps": 1})
    cases = [
        ("tensors", "parallel.tp=2"),
        ("mark", ZERO2),
        ("tensors", ZERO2, "training.async_save=true"),
    ]
    results = ranks(full_then_not, 2, path, tmp_path, cases, limit=120)
    for rank, result in enumerate(results):
        for (what, *_), (said, left, goes_on, same) in zip(cases, result, strict=True):
            kind, words = said
            assert kind == "CheckpointError"
            assert "No space left on device" in words
            assert words.endswith("step-00000001 is still the newest")
            assert what == "mark" or "rank 1" in words
            assert rank or left == ["step-00000001"]
            assert goes_on
            assert same


# where memory runs out on all ranks, and the phase and keys that are then named
PLACES = {
    "vocabtp.opsd.trainer.read_models": ("load phase: ", "parallel.tp", "zero2"),
    "deepspeed.initialize": ("load phase: ", "parallel.tp", "zero2"),
    "vocabtp.opsd.step.generate": (
        *("rollout phase of step 1: ", "training.micro_batch_size_per_gpu"),
        "rollout.max_response_length",
    ),
    "vocabtp.opsd.teacher.Teacher.score": (
        *("teacher phase of step 1: ", "training.micro_batch_size_per_gpu"),
        *("teacher.payload hidden", "teacher.offload_to_cpu"),
    ),
    "deepspeed.DeepSpeedEngine.backward": (
        *("student phase of step 1: ", "distillation.chunk_size"),
        *("training.micro_batch_size_per_gpu", "teacher.prefetch_bytes"),
    ),
    "deepspeed.DeepSpeedEngine.step": ("update phase of step 1: ", "parallel.shard zero2"),
    "vocabtp.opsd.checkpoint.model_tensors": ("save phase: ", "micro_batch_size_per_gpu"),
}


def out_of_memory(rank, world, path, places):
    """What each rank says where memory runs out in `places`, one run each."""
    from unittest import mock

    import deepspeed  # noqa: F401 (what is replaced has to be there)

    said = []
    for place in places:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        with mock.patch(place, side_effect=error):
            try:
                recorded(path, ENGINE, ZERO2)
                said.append("")
            except Exception as caught:
                said.append(f"{type(caught).__name__}: {caught}")
    return said


def test_out_of_memory_names_phase_and_keys(ranks, tmp_path):
    path = tiny_run(tmp_path, training={"max_steps": 1, "train_batch_size": 2})
    for said in ranks(out_of_memory, 2, path, list(PLACES)):
        for words, (phase, *keys) in zip(said, PLACES.values(), strict=True):
            assert words.startswith(f"DeviceMemoryError: out of memory in the {phase}")
            assert all(key in words for key in keys), words
            assert words.endswith("(CUDA out of memory. Tried to allocate 2.00 GiB)")


def one_out_of_memory(rank, world, path, notes):
    """As ranks that a launcher started: memory runs out on the last one, in its third backward."""
    import os
    from unittest import mock

    import deepspeed

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "VOCABTP_OPSD_NOTES": str(notes)}
    backward, calls = deepspeed.DeepSpeedEngine.backward, []

    def third(*args, **options):
        calls.append(1)
        if len(calls) == 3 and rank == world - 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return backward(*args, **options)

    with mock.patch("deepspeed.DeepSpeedEngine.backward", third):
        recorded(path, ENGINE, ZERO2)


def test_out_of_memory_on_one_rank_is_told_by_both(ranks, tmp_path):
    path = tiny_run(tmp_path, training={"train_batch_size": 2})
    with pytest.raises(pytest.fail.Exception) as caught:
        ranks(one_out_of_memory, 2, path, tmp_path, limit=30)
    said = str(caught.value)
    where = "in the student phase of step 3"
    assert f"DeviceMemoryError: out of memory {where}: " in said
    assert f"RankLostError: rank 1 failed {where}" in said
