"""The arguments that several losses share, checked and agreed on.

What is right for a value is decided by the checks of `vocabtp.kernels`, called here under the name
of the public function; here they run before the ranks compare notes, so that what one of them
finds is said on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vocabtp import kernels
from vocabtp.dist._dtensor import local_replica, unchanged
from vocabtp.dist._inputs import Bounds, prepare
from vocabtp.dist.collectives import GroupExchange, group_size
from vocabtp.dist.shard import VocabShard
from vocabtp.kernels import checks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def exchange_of(shard: VocabShard) -> kernels.Exchange:
    """How the ranks of a shard put statistics together."""
    if group_size(shard.tp_group) == 1:
        return kernels.LOCAL
    return GroupExchange(shard.tp_group)


def pair_inputs(
    op: str,
    student: Tensor,
    teacher: Tensor,
    tp_group: ProcessGroup | None,
    shard: VocabShard | None,
    facts: Mapping[str, object],
    check_options: Callable[[], None],
) -> tuple[Tensor, Tensor, VocabShard]:
    """Local student and teacher, agreed on."""

    def check(local: Sequence[Tensor]) -> None:
        checks.pair(op, *local)
        check_options()

    (p, q), own = prepare(
        op,
        {"student_logits": student, "teacher_logits": teacher},
        tp_group=tp_group,
        shard=shard,
        facts=facts,
        check=check,
    )
    p, q = unchanged((p, q), (student, teacher))
    return p, q, own


def token_inputs(
    op: str,
    logits: Tensor,
    index: Tensor,
    tp_group: ProcessGroup | None,
    bounds: Bounds,
    ignore_index: int,
    shard: VocabShard | None,
    temperature: float,
    validate_ids: bool | None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Local logits, ids, and the other arguments of the two kernels ops that take ids."""
    ids = index

    def check(local: Sequence[Tensor]) -> None:
        nonlocal ids
        checks.logits(op, "vocab_parallel_logits", local[0])
        ids = local_replica(index, f"{op}: index")
        checks.index(op, ids, local[0])
        checks.integer(op, "ignore_index", ignore_index)
        checks.temperature(op, temperature)
        if validate_ids is not None:
            checks.flag(op, "validate_ids", validate_ids)

    facts = {
        "index shape": list(index.shape) if isinstance(index, Tensor) else None,
        "ignore_index": ignore_index,
        "temperature": temperature,
        "validate_ids": validate_ids,
    }
    (local,), own = prepare(
        op,
        {"vocab_parallel_logits": logits},
        tp_group=tp_group,
        shard=shard,
        bounds=bounds,
        facts=facts,
        check=check,
    )
    (local,) = unchanged((local,), (logits, index))
    options = {
        "ignore_index": ignore_index,
        "temperature": temperature,
        "exchange": exchange_of(own),
        "vocab_start": own.start,
        "vocab_size": own.global_size,
        "validate_ids": validate_ids,
        "caller": op,
    }
    return local, ids, options
