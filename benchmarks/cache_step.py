"""Part step of cache.py: how much of the copies a training step hides.

A sample is several steps in a row, so that the host is ahead of the device as it is in training
code that does not wait for it, and the first launch does not count; before each, as many plain
steps bring the device to the same clock. Arms that leave most of the chip idle are measured apart:
for seconds after them it runs at another clock than in training. What there is to hide is what a
step takes longer without prefetch than with the teacher's rows on the device; what is hidden of it
is taken in each round of the arms, and its median and range are reported. A second arm on the
device shows what two equal arms differ by.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from cache_parts import Call, Row, Sizes, samples
from vocabtp.cache import PinnedPool, TeacherCache, TeacherLogitCache
from vocabtp.dist import vocab_parallel_kl_div


class Layer(nn.Module):
    """A decoder layer: attention and a gated product, as large as a real one's."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, H]`."""
        parts = self.mix(_normed(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        gate, value = self.up(_normed(x)).chunk(2, -1)
        out: Tensor = x + self.down(functional.silu(gate) * value)
        return out


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def step(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """A step on packed rows of `batch` sequences, every position a response token."""
    width, rows = sizes.widths[0], sizes.batch * sizes.step_positions
    chunk = sizes.chunk * sizes.batch // 2
    with device:
        layers = [Layer(sizes.student, sizes.inner, sizes.heads) for _ in range(sizes.layers)]
        student = nn.Sequential(*layers, nn.Linear(sizes.student, width, bias=False)).bfloat16()
    inputs = torch.randn(sizes.batch, sizes.step_positions, sizes.student, device=device)
    inputs = inputs.bfloat16()
    teacher = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    pool, nbytes = PinnedPool(), teacher.numel() * 2

    def train(read: Callable[[int, int], Tensor]) -> None:
        logits = student(inputs).flatten(0, 1)
        grad = torch.empty_like(logits)
        for start in range(0, rows, chunk):
            part = logits.detach()[start : start + chunk].requires_grad_()
            value = vocab_parallel_kl_div(part, read(start, min(rows, start + chunk)), reverse=True)
            (grad[start : start + chunk],) = torch.autograd.grad(value.sum(), part)
        logits.backward(grad)
        student.zero_grad()

    def cached(cache: TeacherCache, budget: int) -> None:
        if budget:
            cache.prefetch(0, rows, chunk=chunk)
        train(cache.fetch)

    def kept(budget: int) -> Call:
        cache = TeacherLogitCache.store(teacher, pool=pool, prefetch_bytes=budget)
        return lambda: cached(cache, budget)

    def whole() -> None:
        with TeacherLogitCache.store(teacher, pool=pool, donate=True) as cache:
            cached(cache, nbytes)

    alone = TeacherLogitCache.store(teacher, pool=pool)

    def back() -> None:
        for start in range(0, rows, chunk):
            alone.fetch(start, min(rows, start + chunk))

    def both() -> None:
        with TeacherLogitCache.store(teacher, pool=pool, donate=True) as cache:
            for start in range(0, rows, chunk):
                cache.fetch(start, min(rows, start + chunk))

    def forward() -> None:
        with torch.no_grad():
            student(inputs)

    budgets = [nbytes, nbytes // 2, 0]

    def plain() -> None:
        train(lambda a, b: teacher[a:b])

    idle: dict[str, Call] = {
        "forward alone": forward,
        "copies to the device alone": back,
        "copies both ways alone": both,
    }
    arms: dict[str, Call] = {
        "on the device": plain,
        "on the device, again": plain,
        **{f"cache, budget {n}": kept(n) for n in budgets},
        "store and cache": whole,
    }
    found = samples(arms, device, sizes.rounds + 2, sizes.queued, before=plain)
    found |= samples(idle, device, sizes.rounds + 2, sizes.queued)
    shape = {"rows": rows, "cols": width, "chunk": chunk}
    size = [sizes.layers, sizes.student, sizes.inner]
    for arm, times in found.items():
        more: dict[str, object] = {"range_ms": [min(times), max(times)], "queued": sizes.queued}
        if arm.startswith(("cache", "store")):
            copied = found[
                f"copies {'to the device' if arm.startswith('cache') else 'both ways'} alone"
            ]
            more |= {"copy_ms": statistics.median(copied), **_hidden(found, arm)}
        if arm.startswith("cache"):
            more["budget"] = int(arm.rpartition(" ")[2])
        yield {
            "part": "step",
            "arm": arm,
            "ms": statistics.median(times),
            "bytes": nbytes,
            **more,
            **shape,
            "student": size,
        }


def _hidden(found: dict[str, list[float]], arm: str) -> Row:
    """How long the copies of an arm are where nothing hides them, and the part that is hidden."""
    exposed, parts = [], []
    for i, ms in enumerate(found[arm]):
        plain = found["on the device"][i]
        longer = found["cache, budget 0"][i] - plain
        if arm.startswith("store"):
            # and those to the host
            longer += found["copies both ways alone"][i] - found["copies to the device alone"][i]
        exposed.append(longer)
        # no copy takes time on the CPU, but noise may
        parts.append(1 - (ms - plain) / longer if longer > 0 else 1.0)
    return {
        "exposed_ms": statistics.median(exposed),
        "hidden": statistics.median(parts),
        "hidden_range": [min(parts), max(parts)],
    }
