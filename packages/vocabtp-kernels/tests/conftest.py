"""The ops as the tests name them: each with every option that changes what is computed.

Without an accelerator the Triton kernels run under Triton's interpreter, which must be on before
triton is imported.
"""

import pytest
import torch

import triton_interpreter
import vocabtp.kernels as vk
from vocabtp.kernels import _flags, reference
from vocabtp.kernels.testing import OPS

triton_interpreter.switch_on()


# ten times what eager PyTorch needs for logits some 25 apart: fp32's eps of an exponent's argument,
# of a logarithm and of the sums; a chip's own exp2 and log2 add 3e-7
_PART = 1e-4


class Call:
    """One op with its options; `sides` logits tensors, ids if `takes_ids`."""

    def __init__(self, name):
        self.name = name
        self.function, self.options = OPS[name]
        self.sides = 2 if self.function in ("kl_div", "jsd") else 1
        self.takes_ids = self.function.startswith("logprobs")

    def __repr__(self):
        return self.name

    def _args(self, index, options):
        return {**self.options, **options, **({"index": index} if self.takes_ids else {})}

    def __call__(self, *logits, index=None, **options):
        """All values of the op, as a tuple; of two logits takes what it needs."""
        out = getattr(vk, self.function)(*logits[: self.sides], **self._args(index, options))
        return out if isinstance(out, tuple) else (out,)

    def truth(self, *logits, index=None, **options):
        op = getattr(reference, self.function)
        out = op(*logits[: self.sides], **self._args(index, options))
        return out if isinstance(out, tuple) else (out,)

    def true_gradients(self, *logits, upstream, index=None, **options):
        op = getattr(reference, self.function)
        return reference.gradients(op, logits[: self.sides], upstream, **self._args(index, options))

    def assert_each_near(self, gradients, truths, *logits):
        """Judge every element of gradients, for upstream gradients of 1, by its own size.

        A rounding to the logits' dtype and, for the fp32 before it, `_PART` of the element and of
        the probability of its column, since an element is a difference of numbers of that size.
        The rule for whole tensors sees the most probable columns alone.
        """
        softmax = [
            torch.softmax(x.double() / self.options.get("temperature", 1.0), -1)
            for x in logits[: self.sides]
        ]
        sizes = list(softmax)
        if self.function == "kl_div" or self.options.get("beta") in (0.0, 1.0):
            # KL(A || B) has b - a as the gradient to B
            b = 1 if self.options.get("reverse") or self.options.get("beta") == 1.0 else 0
            sizes[b] = softmax[0] + softmax[1]
        for grad, right, size in zip(gradients, truths, sizes, strict=True):
            rounding = torch.finfo(grad.dtype).eps / 2 if grad.dtype != torch.float32 else 0.0
            allowed = (rounding + _PART) * right.abs() + _PART * size
            excess = ((grad.double() - right).abs() / allowed.clamp(min=1e-35)).max().item()
            assert excess <= 1, f"{self.name}: an element errs {excess:.3g} times what it may"


@pytest.fixture(params=list(OPS))
def call(request):
    return Call(request.param)


@pytest.fixture
def threads():
    """Set the number of torch threads; put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def waits(monkeypatch):
    """The flags that a host waited for: torch's debug mode sees no wait for an event."""
    seen, wait = [], _flags.Flag.wait

    def counted(flag):
        seen.append(flag)
        wait(flag)

    monkeypatch.setattr(_flags.Flag, "wait", counted)
    return seen


@pytest.fixture(scope="session")
def interpreter():
    """Triton's interpreter, rounding as chips do."""
    with pytest.MonkeyPatch.context() as patch:
        triton_interpreter.patch(patch.setattr)
        yield


@pytest.fixture
def small(monkeypatch):
    """Tiles so small that a few hundred columns are several steps of several segments."""
    from vocabtp.kernels._triton import jsd, launch

    monkeypatch.setattr(launch, "TILE", 64)
    monkeypatch.setattr(launch, "STEP", 256)
    monkeypatch.setattr(launch, "BLOCK", 128)
    monkeypatch.setattr(launch, "_LEAST_STEPS", 2)
    monkeypatch.setattr(jsd, "_EXACT_TILE", 64)
    return launch


def pytest_terminal_summary(terminalreporter):
    """What test_compile.py found: a line a kernel, the most that any of its variants takes."""
    found = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties:
                found.update(value if name == "compiled" else {})
    if not found:
        return
    terminalreporter.section("registers and bytes of shared memory of the compiled kernels")
    write = terminalreporter.write_line
    write(f"{'kernel (variants)':<28}" + "".join(f"{target:>13}" for target in found))
    for name in sorted({name for kernels in found.values() for name in kernels}):
        there = [kernels.get(name, (0, 0, 0)) for kernels in found.values()]
        cells = "".join(f"{registers:>7}{shared:>6}" for _, registers, shared in there)
        write(f"{f'{name} ({max(there)[0]})':<28}{cells}")
