"""The `ranks` fixture: whatever goes wrong on one rank fails in time and shows every rank."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

LIMIT = 12.0


def _add(rank, world, x, y):
    t = torch.tensor([rank + x])
    dist.all_reduce(t)
    return {"rank": rank, "world": world, "sum": t, "y": y}


def _raise_on_one(rank, world):
    if rank == 1:
        raise ValueError("bad luck on rank one")
    wait_for_peers()


def wait_for_peers():
    dist.barrier()


def _die_on_one(rank, world):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_peers()


def sleep_forever():
    while True:
        time.sleep(0.1)


def _hang_on_one(rank, world):
    if rank == 1:
        sleep_forever()
    wait_for_peers()


def _hang_everywhere(rank, world):
    sleep_forever()


def _mismatch(rank, world):
    dist.all_reduce(torch.zeros(3 + 1000 * rank))
    wait_for_peers()


def _leave_early(rank, world):
    if rank == 0:
        os._exit(0)


def _all_leave(rank, world):
    os._exit(0)


def _unpicklable(rank, world):
    return lambda: rank


def _report_pid(rank, world, folder):
    Path(folder, str(rank)).write_text(str(os.getpid()))
    sleep_forever()


@pytest.fixture(autouse=True)
def server(ranks):
    """Start the fork server before anything is timed: its imports take seconds, once a run."""
    ranks(_nothing, 1)


def _nothing(rank, world):
    pass


def failure(call):
    """The report of a run that must fail, and how long that took."""
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as info:
        call()
    return str(info.value), time.monotonic() - start


def test_results_come_in_rank_order(ranks):
    out = ranks(_add, 3, 10, "z")
    assert [o["rank"] for o in out] == [0, 1, 2]
    assert all(o["sum"].item() == 33 and o["world"] == 3 and o["y"] == "z" for o in out)


def test_an_exception_shows_it_and_the_stacks_of_the_others(ranks):
    text, seconds = failure(lambda: ranks(_raise_on_one, 3, limit=LIMIT))
    assert "ValueError: bad luck on rank one" in text
    assert "in _raise_on_one" in text
    for rank in (0, 2):
        # stopped while they waited, or told of the lost peer
        assert f"--- rank {rank} " in text
    assert text.count("in wait_for_peers") >= 2
    assert seconds < LIMIT


def test_a_killed_rank_is_named(ranks):
    text, seconds = failure(lambda: ranks(_die_on_one, 2, limit=LIMIT))
    assert "rank 0 died of SIGKILL" in text
    assert "--- rank 1 " in text
    assert "in wait_for_peers" in text
    assert seconds < LIMIT


def test_a_hang_on_one_rank_ends_with_its_stack(ranks):
    text, seconds = failure(lambda: ranks(_hang_on_one, 2, limit=6.0))
    assert "rank 1 was still running and was stopped" in text
    assert "in sleep_forever" in text
    assert "--- rank 0 " in text
    assert seconds < 7.5


def test_a_hang_on_all_ranks_ends_with_all_stacks(ranks):
    text, seconds = failure(lambda: ranks(_hang_everywhere, 2, limit=4.0))
    assert text.count("in sleep_forever") == 2
    assert text.count("was still running and was stopped") == 2
    assert seconds < 6


def test_a_size_mismatch_fails_in_time(ranks):
    text, seconds = failure(lambda: ranks(_mismatch, 2, limit=6.0))
    assert "--- rank 0 " in text
    assert "--- rank 1 " in text
    assert seconds < 7.5


def test_a_rank_that_leaves_is_no_success(ranks):
    text, seconds = failure(lambda: ranks(_leave_early, 2, limit=LIMIT))
    assert "rank 1" in text or "ranks [0]" in text
    assert seconds < LIMIT
    text, _ = failure(lambda: ranks(_all_leave, 2, limit=LIMIT))
    assert text == "ranks [0, 1] left without a result"


def test_a_result_that_cannot_be_pickled_is_an_error(ranks):
    text, _ = failure(lambda: ranks(_unpicklable, 2, limit=LIMIT))
    assert "pickle" in text


def test_no_rank_survives_the_test(ranks, tmp_path):
    failure(lambda: ranks(_report_pid, 2, str(tmp_path), limit=4.0))
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)
