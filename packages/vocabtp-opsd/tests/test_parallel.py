"""The layout: who is whose peer, and that no rank fails alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from vocabtp.opsd.errors import ConfigError, ModelError, UserError
from vocabtp.opsd.parallel import Layout, make_layout, shutdown


def section(tp=1, device="cpu", nproc=None):
    return SimpleNamespace(tp=tp, device=device, shard="none", nproc=nproc)


def test_one_process_never_starts_torch_distributed():
    layout = make_layout(section())
    assert layout == Layout()
    assert (layout.world, layout.rank, layout.is_main) == (1, 0, True)
    assert layout.mesh is layout.tp_group is layout.dp_group is layout.world_group is None
    assert not dist.is_initialized()
    with layout.together():
        pass
    with pytest.raises(KeyError), layout.together():
        raise KeyError
    shutdown(layout)


@pytest.mark.parametrize(("world", "tp"), [("1", 2), ("3", 2), ("2", 4)])
def test_tp_must_divide_the_ranks(monkeypatch, world, tp):
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(
        ConfigError, match=rf"parallel\.tp is {tp}, .*{'one' if world == '1' else world} proc"
    ):
        make_layout(section(tp))
    assert not dist.is_initialized()


def test_a_program_of_ones_own_is_told_that_nproc_starts_no_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"parallel\.nproc starts ranks for the command .* alone"):
        make_layout(section(2, nproc=2))


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"parallel\.device is cuda, but PyTorch finds no acc"):
        make_layout(section(device="cuda"))
    assert make_layout(section(device="auto")).device == torch.device("cpu")


def test_devices_are_chosen_by_local_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    with pytest.raises(ConfigError, match=r"parallel\.device is cuda, but PyTorch finds only xpu"):
        make_layout(section(device="cuda"))
    assert make_layout(section(device="cpu")).device == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert make_layout(section(device="auto")).device == torch.device("xpu", 1)
    assert chosen == [1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"3 ranks .* 2 xpu device"):
        make_layout(section(device="auto"))


def _members(group):
    return None if group is None else dist.get_process_group_ranks(group)


def _groups(rank, world):
    out = []
    for tp in (1, 2, 4):
        layout = make_layout(section(tp))
        assert layout.rank == rank
        assert layout.world == world
        out.append((_members(layout.tp_group), _members(layout.dp_group)))
    with pytest.raises(ConfigError, match=r"parallel\.tp is 3, .*4 processes"):
        make_layout(section(3))
    return out


def test_peers_are_neighbours_and_copies_share_a_place(ranks):
    results = ranks(_groups, 4)
    assert [r[0] for r in results] == [(None, [0, 1, 2, 3])] * 4
    assert [r[1] for r in results] == [
        ([0, 1], [0, 2]),
        ([0, 1], [1, 3]),
        ([2, 3], [0, 2]),
        ([2, 3], [1, 3]),
    ]
    assert [r[2] for r in results] == [([0, 1, 2, 3], None)] * 4


def _together(rank, world, raising, kind):
    layout = make_layout(section(1))
    error = {"user": ModelError("no model"), "other": OSError("disk"), "none": None}[kind]
    try:
        with layout.together():
            if error is not None and rank in raising:
                raise error
    except Exception as caught:
        return type(caught).__name__, str(caught), caught is error
    return None


def test_an_error_of_one_rank_is_raised_on_all(ranks):
    own, others = ("ModelError", "no model", True), ("ModelError", "no model", False)
    assert ranks(_together, 3, [1], "user") == [others, own, others]
    assert ranks(_together, 3, [0, 1, 2], "user") == [own] * 3
    named = ("UserError", "rank 2 failed: OSError: disk", False)
    assert ranks(_together, 3, [2], "other") == [named, named, ("OSError", "disk", True)]
    assert ranks(_together, 2, [], "none") == [None, None]
    assert issubclass(ModelError, UserError)


def _started_from_the_environment(rank, world, port, root):
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    layout = make_layout(section(world))
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=layout.tp_group)
    shutdown(layout)
    shutdown(layout)
    ended = not dist.is_initialized()
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{root}/again", world), rank=rank, world_size=world
    )
    return total.item(), ended


def test_torchrun_variables_start_the_ranks(ranks, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = ranks(_started_from_the_environment, 2, port, str(tmp_path))
    assert results == [(3, True), (3, True)]


def test_leave_flushes_and_keeps_the_exit_code():
    code = "from vocabtp.opsd.parallel import leave; print('last words', end=''); leave(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "last words")
