"""From what a caller passes - shard, group, bounds, DTensor - to local tensors and one VocabShard.

Without `shard=` the ranks exchange their facts once and judge them together (`agreement`); with it
nothing is exchanged, since the shard carries the agreement: the caller then vouches that rows,
dtypes and options are the same on all ranks, and a rank that breaks this raises by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from vocabtp.dist._dtensor import group_of, is_dtensor, local_columns, shard_of
from vocabtp.dist.agreement import Record, disagreement, exchange_records
from vocabtp.dist.collectives import check_group, group_rank, group_size
from vocabtp.dist.shard import GATHERED, VocabShard, bounds_of, tiling_problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Bounds(NamedTuple):
    """Which columns this rank holds, as far as somebody said so."""

    start: int | None = None
    end: int | None = None
    global_size: int | None = None


NO_BOUNDS = Bounds()


def prepare(
    op: str,
    tensors: Mapping[str, Any],
    *,
    tp_group: ProcessGroup | None,
    shard: VocabShard | None,
    bounds: Bounds = NO_BOUNDS,
    facts: Mapping[str, object] | None = None,
    check: Callable[[Sequence[Tensor]], None] | None = None,
) -> tuple[list[Tensor], VocabShard]:
    """Local tensors and the shard they are, agreed on by all ranks of its group.

    Args:
        op: the public function, for messages.
        tensors: argument name -> `[..., L]` tensor or DTensor, all of one width.
        tp_group: the caller's group.
        shard: the caller's shard; then no collective is spent.
        bounds: the caller's bounds.
        facts: options and other shapes that must be the same on all ranks.
        check: raises ValueError or TypeError where the local tensors or options are wrong.

    Returns:
        The local tensors in order, and the shard.

    Raises:
        ValueError: on every rank, if one rank's input is wrong or the ranks differ (with `shard=`
            on the rank that is wrong).
        TypeError: not a tensor, a shard or a process group, where no peers wait for an answer.
    """
    check_group(tp_group, f"{op}: tp_group")
    if shard is not None and not isinstance(shard, VocabShard):
        raise TypeError(f"{op}: shard must be a VocabShard, got {type(shard).__name__}")
    group = _group(op, tensors, tp_group, shard)
    waiting = shard is None and group_size(group) > 1  # peers that this rank must answer
    local: list[Tensor] = []
    error: Exception | None = None
    try:
        claim = _claim(op, tensors, group, tp_group, shard, bounds)
        local = [local_columns(x) for x in tensors.values()]
        for name, x in zip(tensors, local, strict=True):
            _check_width(op, name, x.shape[-1], claim)
        if check is not None:
            check(local)
    except Exception as raised:  # whatever it is: peers wait for this rank's answer
        if not waiting:
            raise
        error, claim = raised, NO_BOUNDS
    if not waiting:
        if shard is not None and group_size(group) > 1:
            return local, shard
        return local, _lone_shard(op, local[0].shape[-1], claim, group)
    said = {**_facts(local, claim), **(facts or {})}
    text = None if error is None else str(error).removeprefix(f"{op}: ")
    records = exchange_records({"op": op, **said}, group=group, error=text)
    assert group is not None
    problem = (
        disagreement(records, only=["op"])
        or disagreement(records, only=[name for name in said if name not in _PER_RANK])
        or tiling_problem(records)
    )
    if problem:
        # under one name, should the ranks have called different ops
        raise ValueError(f"{records[0].facts['op']}: {problem}")
    return local, _agreed_shard(records, group)


_PER_RANK = ("width", "start", "end")


def whole_or_shard(
    op: str, logits: Tensor, shard: VocabShard | None, *, empty: bool = False
) -> tuple[Tensor, VocabShard]:
    """Inputs of ops that take a shard and no group: checked locally, without a collective.

    Args:
        op: the public function, for messages.
        logits: `[..., L]` tensor or DTensor.
        shard: which columns they are; None is the whole vocabulary or the DTensor's own shard.
        empty: whether a vocabulary of no columns at all is fine.

    Returns:
        The local tensor, and the shard.
    """
    if shard is None and is_dtensor(logits):
        shard = shard_of(logits, f"{op}: vocab_parallel_logits")

    def check(local: Sequence[Tensor]) -> None:
        if not local[0].is_floating_point():
            raise TypeError(f"{op}: logits must be floating-point, got {local[0].dtype}")

    tensors = {"vocab_parallel_logits": logits}
    (local,), shard = prepare(op, tensors, tp_group=None, shard=shard, check=check)
    if shard.global_size == 0 and not empty:
        raise ValueError(f"{op}: the vocabulary is empty, logits are {list(local.shape)}")
    return local, shard


def _group(
    op: str,
    tensors: Mapping[str, Any],
    tp_group: ProcessGroup | None,
    shard: VocabShard | None,
) -> ProcessGroup | None:
    """Whom to agree with: the caller's group, else that of a DTensor, else nobody."""
    if shard is not None:
        return shard.tp_group
    if tp_group is not None:
        return tp_group
    groups = (group_of(x, f"{op}: {name}") for name, x in tensors.items() if is_dtensor(x))
    return next(groups, None)


def _claim(
    op: str,
    tensors: Mapping[str, Any],
    group: ProcessGroup | None,
    tp_group: ProcessGroup | None,
    shard: VocabShard | None,
    bounds: Bounds,
) -> Bounds:
    """This rank's bounds as its arguments say them; raises where they contradict each other."""
    if shard is not None and tp_group is not None and tp_group != shard.tp_group:
        raise ValueError(f"{op}: tp_group and shard.tp_group must be the same group")
    claims: list[tuple[str, Bounds]] = []
    if shard is not None:
        claims.append(("shard", Bounds(shard.start, shard.end, shard.global_size)))
    if bounds != NO_BOUNDS:
        claims.append(("the vocabulary bounds", _checked_bounds(op, bounds)))
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
        if x.is_nested:  # it has no shape to ask for
            raise TypeError(f"{op}: {name} must be a dense tensor, got a nested one")
        if x.ndim == 0:
            raise ValueError(f"{op}: {name} must be [..., L], got a 0-dimensional tensor")
        if is_dtensor(x):
            own = shard_of(x, f"{op}: {name}")
            if own.tp_group != group:
                whose = "shard.tp_group" if shard is not None else "the group of the call"
                raise ValueError(f"{op}: {name} is a DTensor over another group than {whose}")
            claims.append((name, Bounds(own.start, own.end, own.global_size)))
    merged = NO_BOUNDS
    for name, claim in claims:
        for have, new in zip(merged, claim, strict=True):
            if have is not None and new is not None and have != new:
                raise ValueError(
                    f"{op}: {claims[0][0]} says {_bounds_text(merged)}, "
                    f"{name} says {_bounds_text(claim)}"
                )
        merged = Bounds(*(n if h is None else h for h, n in zip(merged, claim, strict=True)))
    return merged


def _checked_bounds(op: str, bounds: Bounds) -> Bounds:
    for name, value in zip(
        ("vocab_start_index", "vocab_end_index", "global_vocab_size"), bounds, strict=True
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{op}: {name} must be an int or None, got {value!r}")
    start, end, size = bounds
    if (start is None) != (end is None):
        raise ValueError(
            f"{op}: vocab_start_index and vocab_end_index go together, got {start} and {end}"
        )
    if start is not None and end is not None:
        if not 0 <= start <= end or (size is not None and end > size):
            raise ValueError(f"{op}: not a range of the vocabulary: {_bounds_text(bounds)}")
    elif size is not None and size < 0:
        raise ValueError(f"{op}: global_vocab_size must be >= 0, got {size}")
    return bounds


def _check_width(op: str, name: str, width: int, claim: Bounds) -> None:
    if claim.start is None or claim.end is None or width == claim.end - claim.start:
        return
    hint = f"; {GATHERED}" if width == claim.global_size else ""
    raise ValueError(
        f"{op}: {name} has {width} columns, but the shard is {_bounds_text(claim)}, "
        f"{claim.end - claim.start} columns{hint}"
    )


def _bounds_text(bounds: Bounds) -> str:
    size = "?" if bounds.global_size is None else bounds.global_size
    return f"columns [{bounds.start}, {bounds.end}) of {size}"


def _lone_shard(op: str, width: int, claim: Bounds, group: ProcessGroup | None) -> VocabShard:
    """The shard of a single process: all of the vocabulary, or an error."""
    whole = Bounds(0, width, width)
    if any(c is not None and c != w for c, w in zip(claim, whole, strict=True)):
        raise ValueError(
            f"{op}: {_bounds_text(claim)} are not the whole vocabulary, but no other rank holds "
            f"the rest: logits have {width} columns; pass the tp_group that shares the vocabulary"
        )
    return VocabShard(0, width, width, group)


def _facts(local: Sequence[Tensor], claim: Bounds) -> dict[str, object]:
    """What the ranks compare; empty where this rank failed before it knew its tensors."""
    if not local:
        return {}
    return {
        "leading shape": list(local[0].shape[:-1]),
        "dtype": ", ".join(str(x.dtype).removeprefix("torch.") for x in local),
        "device type": ", ".join(x.device.type for x in local),
        "width": local[0].shape[-1],
        "start": claim.start,
        "end": claim.end,
        "global_vocab_size": claim.global_size,
    }


def _agreed_shard(records: Sequence[Record], group: ProcessGroup) -> VocabShard:
    bounds = bounds_of(records)
    start, end = bounds[group_rank(group)]
    return VocabShard(start, end, bounds[-1][1], group)
