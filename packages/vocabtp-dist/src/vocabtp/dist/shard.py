"""Which columns of the vocabulary this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from vocabtp.dist.agreement import Record, disagreement, exchange_records
from vocabtp.dist.collectives import check_group, group_rank, group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GATHERED = "these look like gathered logits: pass this rank's columns only"


@dataclass(frozen=True)
class VocabShard:
    """Columns `[start, end)` of a vocabulary of `global_size`, cut over the ranks of `tp_group`.

    A shard that every rank of the group built or checked together carries that agreement: ops that
    get it as `shard=` spend no collective on validation. `even` and `resolve` build one; a shard
    made by hand from known bounds is checked once with `check`. Ids and whatever else every rank
    passes alike must be equal; their values are not compared, with a shard or without one.

    Attributes:
        start: first column of this rank.
        end: one past the last column of this rank; `end == start` is an empty shard.
        global_size: columns of the whole vocabulary.
        tp_group: the ranks that hold the other columns; None is a single process.

    Raises:
        ValueError: not `0 <= start <= end <= global_size`, or this process is not in the group.
        TypeError: a bound is not an int, or the group is not a process group.
    """

    start: int
    end: int
    global_size: int
    tp_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name in ("start", "end", "global_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"VocabShard: {name} must be an int, got {value!r}")
        if not 0 <= self.start <= self.end <= self.global_size:
            raise ValueError(
                f"VocabShard: needs 0 <= start <= end <= global_size, got start={self.start}, "
                f"end={self.end}, global_size={self.global_size}"
            )
        check_group(self.tp_group, "VocabShard: tp_group")

    @property
    def width(self) -> int:
        """How many columns this rank holds."""
        return self.end - self.start

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return group_rank(self.tp_group)

    @property
    def world_size(self) -> int:
        """How many ranks share the vocabulary."""
        return group_size(self.tp_group)

    @classmethod
    def even(cls, global_size: int, tp_group: ProcessGroup | None = None) -> VocabShard:
        """This rank's piece of `torch.chunk`: ceil-sized pieces, short or empty ones last.

        That is how DTensor and `parallelize_module` cut a weight. No collective.

        Args:
            global_size: columns of the whole vocabulary.
            tp_group: the ranks to cut over.

        Returns:
            This rank's shard.

        Raises:
            ValueError: `global_size` is negative.
            TypeError: `global_size` is not an int.
        """
        check_group(tp_group, "VocabShard.even: tp_group")
        if not isinstance(global_size, int) or isinstance(global_size, bool) or global_size < 0:
            raise (ValueError if type(global_size) is int else TypeError)(
                f"VocabShard.even: global_size must be an int >= 0, got {global_size!r}"
            )
        start, end = even_bounds(global_size, group_size(tp_group))[group_rank(tp_group)]
        return cls(start, end, global_size, tp_group)

    @classmethod
    def resolve(cls, local_size: int, tp_group: ProcessGroup | None = None) -> VocabShard:
        """The shard of each rank from its width alone: bounds are prefix sums in rank order.

        Costs one all_gather; every rank of the group must call it.

        Args:
            local_size: how many columns this rank holds; 0 is allowed.
            tp_group: the ranks that hold the vocabulary.

        Returns:
            This rank's shard.

        Raises:
            ValueError: on every rank, where one rank's `local_size` is not an int >= 0.
        """
        check_group(tp_group, "VocabShard.resolve: tp_group")
        good = isinstance(local_size, int) and not isinstance(local_size, bool) and local_size >= 0
        error = None if good else f"local_size must be an int >= 0, got {local_size!r}"
        records = exchange_records({"width": local_size}, group=tp_group, error=error)
        if problem := disagreement(records, only=()):
            raise ValueError(f"VocabShard.resolve: {problem}")
        bounds = bounds_of(records)
        start, end = bounds[group_rank(tp_group)]
        return cls(start, end, bounds[-1][1], tp_group)

    def check(self) -> VocabShard:
        """Verify with all ranks that the bounds tile the vocabulary in rank order.

        Costs one all_gather; every rank of the group must call it.

        Returns:
            The shard itself.

        Raises:
            ValueError: on every rank, if bounds leave a gap, overlap, do not ascend with the group
                rank, do not start at 0 or do not end at `global_size`, or the sizes differ.
        """
        records = exchange_records(self.facts(), group=self.tp_group)
        if problem := tiling_problem(records):
            raise ValueError(f"VocabShard.check: {problem}")
        return self

    def facts(self) -> dict[str, object]:
        """What an agreement record says of a shard."""
        return {
            "width": self.width,
            "start": self.start,
            "end": self.end,
            "global_vocab_size": self.global_size,
        }


def even_bounds(global_size: int, world_size: int) -> list[tuple[int, int]]:
    """`(start, end)` of each rank as `torch.chunk` cuts, with empty pieces for ranks left over."""
    size = -(-global_size // world_size)
    return [
        (min(rank * size, global_size), min((rank + 1) * size, global_size))
        for rank in range(world_size)
    ]


def bounds_of(records: Sequence[Record]) -> list[tuple[int, int]]:
    """The bounds of all ranks from the widths that they reported: prefix sums in rank order."""
    ends = list(accumulate(int(record.facts["width"]) for record in records))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def tiling_problem(records: Sequence[Record]) -> str | None:
    """Why the reported bounds are no cut of the vocabulary in rank order, or None.

    Facts read: `width`, `start` and `end` (on all ranks or on none), `global_vocab_size`.
    """
    if problem := disagreement(records, only=("global_vocab_size",)):
        return problem
    widths = [int(record.facts["width"]) for record in records]
    size_text = records[0].facts.get("global_vocab_size")
    size = None if size_text in (None, "null") else int(size_text)
    given = [record.facts.get("start", "null") != "null" for record in records]
    if not any(given):
        if size is None or sum(widths) == size:
            return None
        if all(width == size for width in widths):
            return f"{GATHERED}: every rank holds all {size} columns of global_vocab_size={size}"
        return f"the widths {widths} of the ranks add up to {sum(widths)}, not to {size}"
    if not all(given):
        return f"vocabulary bounds must be given on all ranks or on none, got {given}"
    bounds = [(int(r.facts["start"]), int(r.facts["end"])) for r in records]
    return bounds_problem(bounds, size)


def bounds_problem(bounds: Sequence[tuple[int, int]], size: int | None) -> str | None:
    """Why `bounds`, in rank order, do not tile `[0, size)`, or None; `size=None` asks no end."""
    shown = ", ".join(f"[{start}, {end})" for start, end in bounds)
    rule = "bounds must ascend with the group rank, without gap or overlap"
    expected = 0
    for rank, (start, end) in enumerate(bounds):
        if start != expected:
            where = "0" if rank == 0 else f"{expected}, where rank {rank - 1} ends"
            return f"{rule}: rank {rank} starts at {start}, not at {where}; got {shown}"
        expected = end
    if size is not None and expected != size:
        return f"{rule}, from 0 to global_vocab_size={size}: got {shown}"
    return None
