"""The device side of `finish`."""

import triton
import triton.language as tl

from vocabtp.kernels._triton.online import INF


@triton.jit
def _nan_unless_defined(value, s_a, s_b):
    defined = (s_a == s_a) & (s_b == s_b) & (s_a != 0.0) & (s_b != 0.0)
    return tl.where(defined, value, float("nan"))


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(
    sum_ptr, flag_ptr, terms_ptr, out_ptr, rows, scale, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    s_a = tl.load(sum_ptr + row, mask=live, other=1.0)
    second = tl.load(sum_ptr + rows + row, mask=live, other=1.0)
    if KIND == "kl":
        weighted = tl.load(sum_ptr + 2 * rows + row, mask=live, other=0.0)
        value = weighted / s_a + tl.log(second / s_a)
        flag = tl.load(flag_ptr + row, mask=live, other=0.0)
        value = _nan_unless_defined(tl.where(flag != 0.0, INF, value), s_a, second)
    else:
        term = tl.load(terms_ptr + row, mask=live, other=0.0)
        value = _nan_unless_defined(term * scale, s_a, second)
    tl.store(out_ptr + row, value, mask=live)
