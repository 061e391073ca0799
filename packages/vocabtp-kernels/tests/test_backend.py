"""Which implementation runs, the override, and that it reaches every op."""

import subprocess
import threading

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import _backend, _calls, _eager


def test_eager_runs_and_says_why():
    assert vk.which_backend(torch.zeros(2, 3)) == ("eager", "the tensors are on the CPU")
    with vk.backend("eager"):
        assert vk.which_backend(torch.zeros(2, 3)) == ("eager", 'backend("eager")')
    assert vk.which_backend(torch.zeros(2, 3, device="meta"))[0] == "eager"
    with pytest.raises(TypeError, match="which_backend: give the logits of the call"):
        vk.which_backend()
    with pytest.raises(TypeError, match="give the logits of the call, got str"):
        vk.which_backend(torch.zeros(2, 3), "triton")


def test_a_device_without_a_compiler_is_named(monkeypatch):
    from vocabtp.kernels._triton import fallback, launch

    x = torch.zeros(2, 3)
    monkeypatch.setattr(_backend, "_obstacle", lambda *args, **options: None)
    monkeypatch.setattr(launch, "name", lambda device: "Chip 7")
    assert vk.which_backend(x) == ("triton", "Triton kernels for the tensors' device")
    monkeypatch.setattr(fallback, "_broken", {"Chip 7"})
    assert vk.which_backend(x) == ("eager", "a Triton kernel did not compile for the device")


@pytest.mark.parametrize(
    ("error", "gives_up"),
    [
        (RuntimeError("PassManager::run failed"), True),
        (
            RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
            True,
        ),
        (subprocess.CalledProcessError(1, ["gcc"]), True),
        (NotImplementedError("no such instruction"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_what_counts_as_a_compiler_that_gives_up(error, gives_up):
    from vocabtp.kernels._triton import launch

    assert launch._of_compiler(error) == gives_up


def test_a_backend_that_cannot_run_raises_with_the_reason(call):
    x, ids = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    said = r': backend\("triton"\) is not available for these tensors: fp64 runs in eager'
    with vk.backend("triton"), pytest.raises(ValueError, match=call.function + said):
        call(x, x, index=ids)
    with vk.backend("triton"), pytest.raises(ValueError, match="which_backend" + said):
        vk.which_backend(x)
    call(x, x, index=ids)


def test_the_override_nests_and_ends_with_an_exception():
    x = torch.zeros(2, 3)

    def fails():
        with vk.backend("triton"), vk.backend("eager"):
            assert vk.which_backend(x)[1] == 'backend("eager")'
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert vk.which_backend(x)[1] == "the tensors are on the CPU"
    for bad in ("cuda", "", None, True):
        with pytest.raises(ValueError, match=r"^backend: name must be one of"), vk.backend(bad):
            pass


def test_the_override_belongs_to_its_thread():
    seen = []
    with vk.backend("triton"):
        thread = threading.Thread(target=lambda: seen.append(vk.which_backend(torch.zeros(1, 1))))
        thread.start()
        thread.join()
    assert seen[0][0] == "eager"


def test_the_backward_runs_with_the_implementation_of_its_forward(call, monkeypatch):
    class Watched:
        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            self.calls.append(name)
            return getattr(_eager, name)

    watched = Watched()
    choice = _backend.Choice(watched, "watched", "a test")
    monkeypatch.setattr(_calls, "choose", lambda caller, *x: choice)
    x = torch.randn(2, 3, requires_grad=True)
    values = call(x, x.detach(), index=torch.zeros(2, dtype=torch.int64))
    forward = list(watched.calls)
    reads = [name for name in forward if not name.startswith(("finish_", "merge_"))]
    monkeypatch.undo()
    sum(v.sum() for v in values).backward()
    assert reads
    assert all(name.endswith(("_stats", "_terms")) for name in reads)
    kind = {"pair": "jsd"}.get(reads[0].split("_")[0], reads[0].split("_")[0])
    assert watched.calls[len(forward) :] == [f"{kind}_grad"]
