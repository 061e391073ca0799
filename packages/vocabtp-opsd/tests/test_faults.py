"""Numbers that are not finite: found, named, counted, and the end of the run after too many."""

import json
import math

import pytest
import torch
from torch import nn

from faulty_ranks import bad_numbers
from tiny_run import tiny_run
from vocabtp.opsd.config import ParallelConfig, TrainingConfig
from vocabtp.opsd.engine import TorchEngine
from vocabtp.opsd.faults import TokenPlace, first_bad_row
from vocabtp.opsd.parallel import Layout, make_layout


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_first_bad_row_by_sequence_and_place(bad):
    chunks = [torch.zeros(5, 4), torch.zeros(5, 3)]
    lengths = [3, 0, 4]
    assert first_bad_row(chunks, lengths) is None
    chunks[1][0, 2] = bad
    assert first_bad_row(chunks, lengths) == (2, 3)
    chunks[0][4, 3] = bad
    assert first_bad_row(chunks, lengths) == (2, 0)
    chunks[0][2, 0] = bad
    assert first_bad_row(chunks, lengths) == (0, 0)
    assert first_bad_row([], []) is None


def test_places_travel_as_numbers():
    place = TokenPlace(7, 1, 0)
    none = TokenPlace()
    assert not none
    assert TokenPlace.of_ranks(torch.tensor([none.numbers(), place.numbers()])) == place
    assert TokenPlace.of_ranks(torch.tensor([none.numbers()])) == none


def bad_gradient(rank, world):
    """One parameter's gradient is infinite, on the last rank's share alone."""
    layout = make_layout(ParallelConfig(device="cpu")) if world > 1 else Layout()
    net = nn.Module()
    net.first, net.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    net.third = nn.Parameter(torch.ones(1))
    engine = TorchEngine(net, TrainingConfig(), layout, 1)
    factor = math.inf if rank == world - 1 else 1.0
    engine.backward(
        net.first.sum() + net.third.sum() + (net.second * torch.tensor([1.0, factor])).sum()
    )
    result = engine.step(0, tokens=1, report=[1.0], own=[])
    return result.applied, result.reason, net.first.tolist()


def test_a_bad_gradient_is_named():
    assert bad_gradient(0, 1) == (
        False, "the gradient norm is not finite: first in the gradient of second", [1.0] * 3,
    )  # fmt: skip


def test_a_bad_gradient_is_named_alike_on_all_ranks(ranks):
    # the sum over data-parallel ranks carries it to both
    reason = "the gradient norm is not finite: first in the gradient of second on rank 0"
    assert ranks(bad_gradient, 2) == [(False, reason, [1.0] * 3)] * 2


def test_too_many_bad_steps_in_a_row_end_the_run_on_all_ranks(ranks, tmp_path):
    path = tiny_run(
        tmp_path,
        data={"shuffle": False},
        rollout={"temperature": 1.0},
        training={
            "max_steps": 8,
            "micro_batch_size_per_gpu": 1,
            "max_skipped_steps": 2,
            "save_steps": 2,
        },
    )
    # a good step between two bad ones starts the count again
    first, second = ranks(bad_numbers, 2, path, dict.fromkeys((1, 3, 4), "row"), ())
    assert first[0] == second[0] == 4
    assert first[1] == second[1]
    assert first[1].startswith(
        "2 steps in a row were skipped, the last one, step 5, because the loss is not finite: first"
    )
    # that step takes lines 5 to 8 for the second time; the last copy's second prompt is the last
    assert "train.jsonl:8, sample 0, response token 1;" in first[1]
    assert "training.max_skipped_steps (2)" in first[1]
    rows = [json.loads(x) for x in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["applied"] for row in rows] == [True, False, True, False, False]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 2, 3]
    assert "train.jsonl:8, sample 0, response token 1" in rows[1]["skipped_because"]
    # the last checkpoint is whole; the count goes on from it
    assert (tmp_path / "out/checkpoints/step-00000004/COMPLETE").exists()
    again = ranks(bad_numbers, 2, path, {4: "row"}, ())
    assert [a[0] for a in again] == [4, 4]
    more = ("training.max_skipped_steps=3",)
    applied, reasons, moved = ranks(bad_numbers, 2, path, {4: "row"}, more)[0]
    assert applied == moved == [False, True, True, True]
    assert [bool(r) for r in reasons] == [True, False, False, False]
