"""A `[..., L]` tensor as N rows, read in place where at most two strides say where a row starts.

Row `r` starts at `(r // inner) * stride_outer + (r % inner) * stride_inner`. That covers contiguous
tensors, `logits[:, :-1]`, selections and transposed leading dimensions. Anything else, and any
tensor whose vocabulary is not contiguous, is copied once, in its own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows of L columns over the memory of a tensor."""

    blocks: Tensor  # [outer, inner, L], unit stride along L but for those of `as_id_rows`

    @property
    def num_rows(self) -> int:
        """N."""
        return self.blocks.shape[0] * self.blocks.shape[1]

    @property
    def num_cols(self) -> int:
        """L."""
        return self.blocks.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.blocks.device

    def copy(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows as a fresh contiguous `[n, L]` tensor of `dtype`."""
        shape = (rows.stop - rows.start, self.num_cols)
        out = torch.empty(shape, dtype=dtype, device=self.device)
        return self.copy_to(out, rows.start)

    def copy_to(self, out: Tensor, start: int) -> Tensor:
        """As many rows as `out` has, from `start` on; `out` `[n, L]` is contiguous."""
        stop, inner = start + out.shape[0], self.blocks.shape[1]
        row = start
        while row < stop:
            block, first = divmod(row, inner)
            if first == 0 and stop - row >= inner:
                whole = (stop - row) // inner
                part = self.blocks[block : block + whole]
                count = whole * inner
            else:
                count = min(inner - first, stop - row)
                part = self.blocks[block, first : first + count]
            out[row - start : row - start + count].view(part.shape).copy_(part)
            row += count
        return out


def as_rows(tensor: Tensor) -> Rows:
    """View `tensor` `[..., L]` as rows, in row-major order of its leading dimensions."""
    # the memory of a lazily negated view, as of x.conj().imag, has the other sign
    tensor = tensor.detach().resolve_neg()
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return as_id_rows(tensor)


def as_id_rows(tensor: Tensor) -> Rows:
    """The same of ids `[..., K]`, with whatever stride along K."""
    cols = tensor.shape[-1]
    if tensor.numel() == 0:
        # strides mean nothing here, and contiguous() leaves them as they are
        return Rows(tensor.new_empty(1, tensor.shape[:-1].numel(), cols))
    lead = _collapse(tensor.shape[:-1], tensor.stride()[:-1])
    if len(lead) > 2:
        tensor = tensor.contiguous()
        lead = _collapse(tensor.shape[:-1], tensor.stride()[:-1])
    (outer, stride_outer), (inner, stride_inner) = [(1, 0)] * (2 - len(lead)) + lead
    # one column may lie at any stride: nothing steps along it
    step = tensor.stride(-1) if cols > 1 else 1
    return Rows(tensor.as_strided((outer, inner, cols), (stride_outer, stride_inner, step)))


def _collapse(shape: torch.Size, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Merge neighbouring dimensions that one stride can walk."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims
