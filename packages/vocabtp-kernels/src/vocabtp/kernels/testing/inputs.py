"""Inputs that break implementations, each for a student, a teacher, ids and upstream gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

INF = float("inf")
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a case feeds to an op; ops of one distribution take the student alone."""

    student: Tensor  # [..., V]
    teacher: Tensor  # [..., V]
    index: Tensor  # [..., K], or [...] in cases of one id a row
    upstream: Tensor  # [...]; every id of a row gets its row's

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Inputs:
        """Logits of `dtype`, everything on `device`; strides stay what they are."""
        return Inputs(
            _place(self.student, dtype, device),
            _place(self.teacher, dtype, device),
            self.index.to(device),
            self.upstream.to(device),
        )


def _place(x: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    # a copy of the whole buffer: .to() would make a strided view dense
    size = x.untyped_storage().nbytes() // x.element_size()
    buffer = x.as_strided((size,), (1,), 0).to(device, dtype)
    return buffer.as_strided(x.shape, x.stride(), x.storage_offset())


def _normal(*shape: int, seed: int = 0, width: float = 3.0, ids: int = 2) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    student = torch.randn(*shape, generator=g) * width
    teacher = torch.randn(*shape, generator=g) * width
    index = torch.randint(0, shape[-1], (*shape[:-1], ids), generator=g)
    return Inputs(student, teacher, index, torch.randn(*shape[:-1], generator=g))


def normal() -> Inputs:
    """Unrelated sides; ids ignored and given twice."""
    made = _normal(9, 1009)
    made.index[0, 0] = -100
    made.index[1] = -100
    made.index[2, 1] = made.index[2, 0]
    return made


def one_row() -> Inputs:
    """A single row, ids `[...]`, leading shape empty."""
    made = _normal(1, 130)
    return Inputs(made.student[0], made.teacher[0], made.index[0, 0], made.upstream[0])


def narrow() -> Inputs:
    """One token, which is certain."""
    return _normal(5, 1)


def wide() -> Inputs:
    """More columns than a tile of any kernel, and not a multiple of anything."""
    return _normal(2, 70_001, ids=1)


def near() -> Inputs:
    """A teacher close to the student."""
    made = _normal(4, 5_003)
    noise = torch.randn(4, 5_003, generator=torch.Generator().manual_seed(1))
    return replace(made, teacher=made.student + 1e-3 * noise)


def offsets() -> Inputs:
    """A common offset, another one on each side; what fp16 holds of it."""
    made = _normal(6, 301)
    shift = torch.tensor([1e4, -1e4, 3e4, 0.0, 6e4, -6e4])[:, None]
    return replace(made, student=made.student + shift, teacher=made.teacher - shift)


def extremes() -> Inputs:
    """The largest numbers of fp16, and probabilities that underflow."""
    made = _normal(4, 40)
    made.student[0, ::2], made.student[0, 1::2] = 65504.0, -65504.0
    made.teacher[0, ::2], made.teacher[0, 1::2] = -65504.0, 65504.0
    made.student[1] *= 60
    made.teacher[2] *= 60
    return made


def masked() -> Inputs:
    """Tokens outside both supports: all but one, the leading half, every other one."""
    made = _normal(4, 3_000)
    for side in (made.student, made.teacher):
        side[0] = -INF
        side[0, 2_999] = 1.0
        side[1, :1_500] = -INF
        side[2, ::2] = -INF
    made.index[:, 0] = torch.tensor([2_999, 2_000, 1, 5])
    return made


def lowest() -> Inputs:
    """Numbers of which a few add up to infinity: low ones are no mask, though they look like it."""
    made = _normal(5, 9_001)
    made.student[0, :4_300], made.teacher[0, :4_300] = -200.0, -1e38
    made.student[1, 4_200:], made.teacher[1, 4_200:] = -1e38, -150.0
    made.student[2, 7:], made.teacher[2, 7:] = -1e38, -1e38
    # seen in the sum, yet not all of it: fp32 has a probability of e^-90 with an error of 5e-6
    made.student[3, 5_000:5_003], made.teacher[3, 5_000:5_003] = -136.0, -1e38
    made.student[4, 5], made.teacher[4, 5] = 1e38, 1e38
    made.index.fill_(5)
    return made


def disagreement() -> Inputs:
    """Tokens outside one support only, with and without an upstream gradient."""
    made = _normal(6, 50)
    made.student[0, 3:9] = -INF
    made.teacher[1, 40:] = -INF
    made.student[2, :25], made.teacher[2, 25:] = -INF, -INF
    made.teacher[3, 7], made.student[3, 7] = -INF, -300.0
    made.upstream[1] = 0.0
    made.index[0, 0] = 4
    return made


def undefined() -> Inputs:
    """Rows without any support on one side or both, and NaN and +inf ones."""
    made = _normal(8, 33)
    made.student[0] = -INF
    made.teacher[1] = -INF
    made.student[2], made.teacher[2] = -INF, -INF
    made.student[3, 5] = NAN
    made.teacher[4, 31] = INF
    made.student[5, 0], made.teacher[5, 1] = NAN, -INF
    made.student[6, 2] = INF
    made.upstream[6] = 0.0
    return made


def views() -> Inputs:
    """The student without its last column, the teacher with its leading dimensions transposed."""
    made = _normal(4, 6, 131)
    turned = made.teacher.transpose(0, 1).contiguous().transpose(0, 1)
    index = made.index.clamp(max=129)
    return replace(made, student=made.student[..., :-1], teacher=turned[..., :-1], index=index)


def copies() -> Inputs:
    """Layouts that need a copy: a strided vocabulary, three strides over the rows."""
    made = _normal(2, 3, 4, 64)
    wide = _normal(4, 4, 6, 64, seed=2).teacher[::2, :3, :4]
    narrow = made.student[..., ::2]
    index = made.index.clamp(max=31)
    return replace(made, student=narrow, teacher=wide[..., 32:], index=index)


def no_rows() -> Inputs:
    """An empty micro-batch."""
    return _normal(0, 17)


INPUTS: tuple[Callable[[], Inputs], ...] = (
    normal,
    one_row,
    narrow,
    wide,
    near,
    offsets,
    extremes,
    masked,
    lowest,
    disagreement,
    undefined,
    views,
    copies,
    no_rows,
)
