"""Which layouts are read in place, and that rows come out in order from all of them."""

import pytest
import torch

from vocabtp.kernels._rows import as_id_rows, as_rows

BASE = torch.arange(4 * 5 * 6 * 7.0).view(4, 5, 6, 7)
IN_PLACE = {
    "contiguous": BASE,
    "narrowed": BASE[..., :-1],
    "one row": BASE[0, 0, 0],
    "selected": BASE[:, 2],
    "sliced twice": BASE[1:3, :, 2, 1:4],
    "transposed": BASE[0].transpose(0, 1),
    "turned": BASE[:, :, 3].transpose(0, 1),
    "every other": BASE[::2, 0],
    "expanded": BASE[0, :1, 0].expand(9, 7),
    "expanded twice": BASE[:, 0, :1].expand(4, 6, 7),
    "one column": BASE[..., 3:4],
    "one strided column": BASE[:, :, 0, ::7],
    "ones": BASE[:, :1, 2:3],
}
COPIED = {
    "strided vocabulary": BASE[..., ::2],
    "vocabulary not last": BASE.transpose(-1, 0),
    "negated": torch._neg_view(BASE),  # the memory has the other sign
    "negated, of complex numbers": torch.complex(BASE, BASE).conj().imag,
    "three strides": BASE[::2, :3, :4],
    "permuted": BASE.permute(2, 1, 0, 3)[:, ::2],
}
EMPTY = {
    "no rows": BASE[:0],
    "no columns": BASE[..., :0],
    "no columns, three strides": BASE[::2, :3, :4, 2:2],
    "no rows, strided": BASE[:, 1:1, :, ::2],
}

IDS_IN_PLACE = {
    **IN_PLACE,
    "strided": BASE[..., ::2],
    "ids not last": BASE.transpose(-1, 0),
    "ids between": BASE[0].transpose(-1, -2),
    "expanded along the row": BASE[..., :1].expand(-1, -1, -1, 9),
    "expanded everywhere": BASE[:1, :1, :1, :1].expand(3, 4, 2, 5),
}
IDS_COPIED = {name: COPIED[name] for name in ("three strides", "permuted")}


@pytest.mark.parametrize("name", [*IN_PLACE, *COPIED, *EMPTY])
def test_rows_come_in_row_major_order(name):
    x = {**IN_PLACE, **COPIED, **EMPTY}[name]
    rows = as_rows(x)
    n = x.shape[:-1].numel()
    right = x.reshape(n, x.shape[-1]).double()
    assert (rows.num_rows, rows.num_cols) == right.shape
    for start in range(n + 1):
        for stop in {start, min(start + 1, n), min(start + 4, n), n}:
            part = rows.copy(slice(start, stop), torch.float64)
            assert part.is_contiguous()
            assert torch.equal(part, right[start:stop])
            part.fill_(-1.0)  # a copy: the rows keep theirs
    assert torch.equal(rows.copy(slice(0, n), torch.float64), right)


@pytest.mark.parametrize("name", IN_PLACE)
def test_two_strides_are_read_in_place(name):
    rows = as_rows(IN_PLACE[name])
    assert rows.blocks.data_ptr() == IN_PLACE[name].data_ptr()
    assert rows.blocks.untyped_storage().data_ptr() == BASE.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", COPIED)
def test_anything_else_is_copied(name):
    rows = as_rows(COPIED[name])
    assert rows.blocks.untyped_storage().data_ptr() != BASE.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", [*IDS_IN_PLACE, *IDS_COPIED, *EMPTY])
def test_rows_of_ids_come_in_row_major_order(name):
    x = {**IDS_IN_PLACE, **IDS_COPIED, **EMPTY}[name]
    rows = as_id_rows(x)
    n = x.shape[:-1].numel()
    assert (rows.num_rows, rows.num_cols) == (n, x.shape[-1])
    assert torch.equal(rows.copy(slice(0, n), x.dtype), x.reshape(n, x.shape[-1]))
    assert torch.equal(rows.copy(slice(n // 3, n), x.dtype), x.reshape(n, x.shape[-1])[n // 3 :])
    if name not in EMPTY:
        same = rows.blocks.untyped_storage().data_ptr() == BASE.untyped_storage().data_ptr()
        assert same == (name in IDS_IN_PLACE)
