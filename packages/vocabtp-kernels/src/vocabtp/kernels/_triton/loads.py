"""Helpers on the device: where a row is, and loads of 16 bytes wherever it begins.

A load of 16 bytes wants an address that 16 divides, and a warp's loads are fewest where they fill
whole lines of 128 bytes. Where rows do not begin at a multiple of 16 bytes (75967 columns), lane i
of a program holds slot i - phase of `online` instead of slot i, the phase being the number of
elements from the line's beginning to the row's. The first `phase` lanes are a tile ahead of the
others then. Addresses count from `phase` columns before the row.

The element-wise kernels have no slots: their lanes follow the rows of a gradient, so that it is
stored 16 bytes at a time. A row of two-byte logits that begins elsewhere in 16 bytes is loaded by
words of 8, two of which have what four lanes need; then a gradient is stored 8 bytes at a time.
"""

import triton
import triton.language as tl


@triton.jit
def row_offset(row, inner, stride_outer, stride_inner):
    # int64: a row's offset passes 2**31 at 8192 rows of 262144 columns
    outer = (row // inner).to(tl.int64)
    return outer * stride_outer + (row % inner).to(tl.int64) * stride_inner


@triton.jit
def widen(x):
    """To fp32; a bf16 number is the upper half of one, and shifting it costs less than a cast."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def phase_of(ptr, SHIFT: tl.constexpr):
    """Elements from the last line's beginning to a row's first column."""
    if SHIFT:
        size: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        return ((ptr.to(tl.int64) & 127) // size).to(tl.int32)
    else:
        return 0


@triton.jit
def back(ptr, phase, WIDE: tl.constexpr, WORDS: tl.constexpr):
    """The row from `phase` columns before its first; WIDE promises that 16 divides the address.

    With WORDS a thread has four columns instead of eight: so many has a word of two-byte numbers.
    """
    ptr -= phase
    if WIDE:
        if WORDS and ptr.dtype.element_ty.primitive_bitwidth == 16:
            ptr = tl.multiple_of(ptr, 8)
        else:
            ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def load(ptr, at):
    return widen(tl.load(ptr + at))


@triton.jit
def load_at(ptr, at, mask):
    return widen(tl.load(ptr + at, mask=mask, other=-float("inf")))


@triton.jit
def lanes_of(phase, TILE: tl.constexpr):
    """Where lanes find their first column, counted from `back`, and which are a tile ahead."""
    lanes = tl.arange(0, TILE)
    ahead = lanes < phase
    return tl.where(ahead, lanes + TILE, lanes), ahead


@triton.jit
def whole_tiles(
    start, stop, cols, phase, TILES: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr
):
    """How many groups of `TILES` tiles can be loaded without a mask."""
    groups = (stop - start) // (TILES * TILE)
    if SHIFT:
        # lanes that are ahead read one tile more
        inside = tl.maximum(cols + phase - start - TILE, 0) // (TILES * TILE)
        groups = tl.minimum(groups, inside)
    return groups


@triton.jit
def first_tile(ptr, start, phase, limit, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """The tile at `start`, of which only lanes that are not ahead are read."""
    if SHIFT:
        at = start + tl.arange(0, TILE)
        return load_at(ptr, at, (at >= start + phase) & (at < limit))
    else:
        return tl.zeros([TILE], tl.float32)


@triton.jit
def next_tile(ptr, at, before, ahead, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """The slots' values of the tile at `at`, and the tile that the next one needs."""
    if SHIFT:
        x = load(ptr, at + TILE)
        return tl.where(ahead, x, before), x
    else:
        return load(ptr, at), before


@triton.jit
def next4(ptr, at, before, ahead, TILE: tl.constexpr, SHIFT: tl.constexpr):
    x0, before = next_tile(ptr, at, before, ahead, TILE, SHIFT)
    x1, before = next_tile(ptr, at + TILE, before, ahead, TILE, SHIFT)
    x2, before = next_tile(ptr, at + 2 * TILE, before, ahead, TILE, SHIFT)
    x3, before = next_tile(ptr, at + 3 * TILE, before, ahead, TILE, SHIFT)
    return x0, x1, x2, x3, before


@triton.jit
def masked4(ptr, at, limit, TILE: tl.constexpr):
    """Four tiles at the end of a row, `at` from `lanes_of`."""
    return (
        load_at(ptr, at, at < limit),
        load_at(ptr, at + TILE, at + TILE < limit),
        load_at(ptr, at + 2 * TILE, at + 2 * TILE < limit),
        load_at(ptr, at + 3 * TILE, at + 3 * TILE < limit),
    )


@triton.jit
def tile_within(ptr, first, low, high, phase, limit, TILE: tl.constexpr):
    """The tile at `first`, -inf outside of `low` to `high`, read without a mask inside the row."""
    at = first + tl.arange(0, TILE)
    mine = (at >= low) & (at < high)
    if (first >= phase) & (first + TILE <= limit):
        x = tl.load(ptr + at)
    else:
        x = tl.load(ptr + at, mask=mine, other=0.0)
    return tl.where(mine, widen(x), -float("inf"))


@triton.jit
def _first_whole(phase):
    # four columns come from two words, which begin up to three columns before them
    return (phase + 10) // 8 * 8


@triton.jit
def _last_whole(limit):
    # and end up to four behind them
    return (limit - 4) // 8 * 8


@triton.jit
def in_whole(at, phase, limit, SHIFT: tl.constexpr):
    """What a block has of a row; in SHIFT of its eights with so much room that words stay inside.

    A mask that is the same for eight columns costs a load no more. It is one for all loads and
    stores, since the program of a column also sees to its ids.
    """
    if SHIFT:
        return (at >= _first_whole(phase)) & (at < _last_whole(limit))
    else:
        return at < limit


@triton.jit
def _load_words(ptr, first, limit, phase, BLOCK: tl.constexpr):
    """A block of two-byte numbers that begins anywhere, of the words that it begins in."""
    skipped = ((ptr.to(tl.int64) & 7) // 2).to(tl.int32)
    words_ptr = (ptr - skipped).to(tl.pointer_type(tl.uint64), bitcast=True)
    words_ptr = tl.multiple_of(words_ptr, 8)
    word = first // 4 + tl.arange(0, BLOCK // 4)
    mask = in_whole(4 * word, phase, limit, True)
    low = tl.load(words_ptr + word, mask=mask, other=0)
    high = tl.load(words_ptr + word + 1, mask=mask, other=0)
    bits = (16 * skipped).to(tl.uint64)
    # by 64 in two steps: by as many bits as a word has, a shift is undefined
    four = (low >> bits) | ((high << 1) << (63 - bits))
    x0, x1 = four.to(tl.uint16), (four >> 16).to(tl.uint16)
    x2, x3 = (four >> 32).to(tl.uint16), (four >> 48).to(tl.uint16)
    x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [BLOCK])
    return widen(x.to(ptr.dtype.element_ty, bitcast=True))


@triton.jit
def load_block(
    ptr, first, limit, phase, BLOCK: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr
):
    """Columns `first` to `first + BLOCK` of an element-wise kernel, counted from `back`.

    Lanes outside of `in_whole` hold -inf or 0, and are not to be stored.
    """
    if WIDE or ptr.dtype.element_ty.primitive_bitwidth != 16:
        at = first + tl.arange(0, BLOCK)
        return load_at(ptr, at, in_whole(at, phase, limit, SHIFT))
    else:
        return _load_words(ptr, first, limit, phase, BLOCK)


@triton.jit
def store_block(ptr, first, limit, phase, x, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    tl.store(ptr + at, x, mask=in_whole(at, phase, limit, SHIFT))


@triton.jit
def ragged(phase, limit):
    """Columns `[32]` of a row that `in_whole` leaves out before and after, and which exist."""
    lanes = tl.arange(0, 32)
    begin = _first_whole(phase)
    # a row without a whole eight ends before the next one
    end = tl.maximum(_last_whole(limit), begin)
    at = tl.where(lanes < 16, phase // 8 * 8 + lanes, end + lanes - 16)
    mine = (lanes >= 16) | ((at >= phase) & (at < begin))
    return at, mine & (at < limit)
