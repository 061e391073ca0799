"""Bad ids on an accelerator: who hears of them and when, who waits, and inside a CUDA graph."""

import threading

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import _flags, _ids

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 6, 5_000


@pytest.fixture
def device():
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.empty(0, device=found).device


@pytest.fixture(autouse=True)
def _nothing_is_left():
    vk.check_ids()
    yield
    vk.check_ids()
    assert not _ids._pending


def leaf(device, rows=ROWS, dtype=torch.bfloat16):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, WIDTH, generator=g, device=device) * 3
    return x.to(dtype).requires_grad_()


def good_ids(device, many=2, rows=ROWS):
    return torch.arange(rows * many, device=device).view(rows, many)


def bad_ids(device, at=1, value=WIDTH, many=2):
    ids = good_ids(device, many)
    ids[at, -1] = value
    return ids


@pytest.fixture
def watched():
    """Errors where a call synchronizes or copies to the host; waits for events pass."""

    def during(call):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return during


FOLLOWERS = {
    "check_ids": lambda x, ids: vk.check_ids(),
    "logprobs": lambda x, ids: vk.logprobs(x, ids),
    "logprobs_and_entropy": lambda x, ids: vk.logprobs_and_entropy(x, ids),
    "entropy": lambda x, ids: vk.entropy(x),
    "kl_div": lambda x, ids: vk.kl_div(x, x),
    "jsd": lambda x, ids: vk.jsd(x, x),
}


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("follower", FOLLOWERS)
def test_the_next_call_raises_once(follower, backend, device):
    x, good, bad = leaf(device), good_ids(device), bad_ids(device, at=4)
    with vk.backend(backend):
        lp, h = vk.logprobs_and_entropy(x, bad)
        with pytest.raises(ValueError, match=rf"got {WIDTH} at position \[4\]; 1 of {ROWS} rows"):
            FOLLOWERS[follower](x, good)
        FOLLOWERS[follower](x, good)
    assert lp[4].isnan().all()
    assert lp.isnan().sum() == 2
    assert h.isfinite().all()
    (grad,) = torch.autograd.grad(lp.sum(), x)
    assert grad[4].isnan().all()
    assert grad.isnan().sum() == WIDTH


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_validation_before_the_return(backend, device):
    with vk.backend(backend), pytest.raises(ValueError, match=f"got {WIDTH}"):
        vk.logprobs(leaf(device), bad_ids(device), validate_ids=True)
    assert not _ids._pending


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("many", [1, 2, 300])
def test_the_next_call_alone_waits_and_for_one_event(many, device, watched, waits):
    if device.type != "cuda":
        return
    x, good, bad = leaf(device), good_ids(device, many), bad_ids(device, many=many)

    def calls(ids):
        lp, h = vk.logprobs_and_entropy(x, ids)
        (lp.sum() + h.sum() + vk.logprobs(x, good).sum() + vk.entropy(x).sum()).backward()

    calls(good)
    waits.clear()
    # the second and the third op each wait for the ids of the one before, no backward does
    watched(lambda: calls(good))
    assert len(waits) == 2
    watched(lambda: vk.logprobs(x, bad))
    assert len(waits) == 2
    with pytest.raises(ValueError, match=f"got {WIDTH}"):
        vk.check_ids()


def test_flags_come_back(device):
    x, good = leaf(device), good_ids(device)
    vk.logprobs(x, good)
    vk.check_ids()
    free = len(_flags._free[device])
    for at in range(10):
        vk.logprobs(x, good)
        assert len(_flags._free[device]) == free - 1
        vk.logprobs(x, bad_ids(device, at % ROWS))
        with pytest.raises(ValueError, match=rf"position \[{at % ROWS}\]"):
            vk.check_ids()
        # a flag that came back is down
        vk.logprobs(x, good)
        vk.check_ids()
        assert len(_flags._free[device]) == free
    assert all(flag.cell.item() == 0 for flag in _flags._free[device])


def test_threads_do_not_share_a_flag(device):
    x, good = leaf(device), good_ids(device)
    vk.logprobs(x, good)
    errors, caught = [], []

    def work(bad):
        try:
            for _ in range(20):
                vk.logprobs(x, good)
            vk.logprobs(x, bad)
        except ValueError as error:
            caught.append(str(error))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(bad_ids(device, at),)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        vk.check_ids()
    except ValueError as error:
        caught.append(str(error))
    assert not errors
    assert caught
    assert all(f"got {WIDTH} at position" in said for said in caught)


def capture(step):
    """`step` as a graph, after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("many", [1, 3])
def test_a_replay_reports_at_check_ids(many, backend, device):
    if device.type != "cuda":
        return
    x, ids = leaf(device), good_ids(device, many)
    good, bad = ids.clone(), bad_ids(device, at=2, many=many)
    up = torch.randn(ROWS, many, device=device)

    def step():
        with vk.backend(backend):
            lp = vk.logprobs(x, ids)
        return lp.detach(), torch.autograd.grad(lp, x, up)[0]

    graph, (lp, grad) = capture(step)
    vk.check_ids()
    right = step()
    for replay in range(2):
        ids.copy_(good)
        graph.replay()
        vk.check_ids()
        assert torch.equal(lp, right[0])
        assert torch.equal(grad, right[1])
        ids.copy_(bad)
        graph.replay()
        # an op neither reports nor waits for a replay
        vk.entropy(x)
        with pytest.raises(ValueError, match=rf"got {WIDTH} at position \[2\]"):
            vk.check_ids()
        vk.check_ids()
        rest = torch.arange(ROWS, device=device) != 2
        for value, same in zip((lp, grad), right, strict=True):
            assert value[2].isnan().all(), replay
            assert torch.equal(value[rest], same[rest])


def test_a_capture_asks_for_no_validation_and_leaves_earlier_calls(device):
    if device.type != "cuda":
        return
    x, bad = leaf(device), bad_ids(device)
    vk.logprobs(x, good_ids(device))
    vk.check_ids()
    vk.logprobs(x, bad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vk.check_ids()
        lp = vk.logprobs(x, bad, validate_ids=True)
    with pytest.raises(ValueError, match=f"got {WIDTH}"):
        vk.check_ids()
    graph.replay()
    with pytest.raises(ValueError, match=f"got {WIDTH}"):
        vk.check_ids()
    assert lp[1].isnan().all()


def test_a_capture_without_memory_for_flags_is_nan_alone(device, monkeypatch):
    if device.type != "cuda":
        return
    x, bad = leaf(device), bad_ids(device)
    vk.logprobs(x, good_ids(device))
    vk.check_ids()
    monkeypatch.setattr(_flags, "take", lambda device: None)
    vk.logprobs(x, good_ids(device), validate_ids=True)  # compiles what takes no flag
    monkeypatch.undo()
    monkeypatch.setattr(_flags, "_free", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lp = vk.logprobs(x, bad)
    graph.replay()
    vk.check_ids()
    assert lp[1].isnan().all()
