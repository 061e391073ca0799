"""What all ranks must agree on before the first real collective, and the error they share.

A rank that raises alone leaves its peers waiting, and a collective over tensors of unequal shapes
hangs or mixes rows. So each rank writes what it knows - shapes, dtypes, bounds, options, and the
text of an error of its own - into a record of fixed size, the records are gathered by **one**
all_gather, and every rank judges the same list: all return, or all raise the same ValueError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vocabtp.dist.collectives import all_gather, control_device, group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# fixed, so that one all_gather does: no sizes have to be exchanged first
_RECORD_BYTES = 4096
_VALUE_CHARS = 240
_ERROR_CHARS = 1200


@dataclass(frozen=True)
class Record:
    """What one rank said: its facts, already as text that compares equal, and its own error."""

    facts: dict[str, str]
    error: str | None


def agree(
    facts: Mapping[str, object],
    *,
    what: str,
    group: ProcessGroup | None,
    error: str | BaseException | None = None,
) -> None:
    """Return on all ranks, or raise the same ValueError on all of them; one all_gather.

    Every rank of `group` calls it: one that met an error of its own passes it as `error` instead of
    raising, so that nobody is left waiting.

    Args:
        facts: names and values that must be the same on every rank. Values compare by their JSON
            text, or by `repr` where JSON has none; long ones by a hash.
        what: who asks, for the message (`"vocab_parallel_entropy"`).
        group: the ranks that must agree; None is a single process.
        error: this rank's own error, if it has one.

    Raises:
        ValueError: a rank has an error, or the facts differ; the message names the ranks.
    """
    records = exchange_records({"op": what, **facts}, group=group, error=error)
    if problem := disagreement(records, only=["op"]) or disagreement(records):
        raise ValueError(f"{records[0].facts.get('op', what)}: {problem}")


def exchange_records(
    facts: Mapping[str, object],
    *,
    group: ProcessGroup | None,
    error: str | BaseException | None = None,
) -> list[Record]:
    """The records of all ranks in rank order, the same list on every rank; one all_gather."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="the ranks compare their arguments before each call of vocabtp.dist; "
            "give shard= (a VocabShard, made outside) to keep the call in one graph"
        )
    data = _encode(facts, None if error is None else str(error) or type(error).__name__)
    if group is None or group_size(group) == 1:
        return [_decode(data)]
    mine = torch.zeros(_RECORD_BYTES, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = all_gather(mine.to(control_device(group)), group)
    # by way of memory that Python can read: Tensor.numpy() needs numpy, which torch does not bring
    said = bytearray(rows.numel())
    torch.frombuffer(said, dtype=torch.uint8).copy_(rows.view(-1))
    records = (said[i : i + _RECORD_BYTES] for i in range(0, len(said), _RECORD_BYTES))
    return [_decode(record.rstrip(b"\0")) for record in records]


def disagreement(records: Sequence[Record], only: Sequence[str] | None = None) -> str | None:
    """Errors of ranks first, then the facts that differ (all, or those in `only`); None if none."""
    errors: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        if record.error is not None:
            errors.setdefault(record.error, []).append(rank)
    if len(records) == 1 and errors:
        return next(iter(errors))
    if errors:
        return "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in errors.items())
    names = list(dict.fromkeys(name for record in records for name in record.facts))
    parts = []
    for name in names if only is None else only:
        values: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            values.setdefault(record.facts.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            said = ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in values.items())
            parts.append(f"{name} must be the same on all ranks, got {said}")
    return "; ".join(parts) or None


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1` or `ranks 0, 2`; long lists are cut."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _encode(facts: Mapping[str, object], error: str | None) -> bytes:
    texts = {name: _value_text(value) for name, value in facts.items()}
    if error is not None and len(error) > _ERROR_CHARS:
        error = error[: _ERROR_CHARS - 3] + "..."
    data = _json_bytes([texts, error])
    if len(data) > _RECORD_BYTES:
        # too much to send: the hash still tells whether the ranks agree
        digest = hashlib.sha256(_json_bytes(texts)).hexdigest()[:16]
        cut = None if error is None else error[: _ERROR_CHARS // 3]
        first = dict(list(texts.items())[:1])
        data = _json_bytes([{**first, f"{len(texts)} facts": f"hash {digest}"}, cut])
    # at most 6 bytes a character: a third of an error and one value always fit
    assert len(data) <= _RECORD_BYTES
    return data


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _decode(data: bytes | bytearray) -> Record:
    facts, error = json.loads(data)
    return Record(facts=facts, error=error)


def _value_text(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    if isinstance(value, str):
        text = value
    if len(text) <= _VALUE_CHARS:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[: _VALUE_CHARS // 2]}... (hash {digest})"
