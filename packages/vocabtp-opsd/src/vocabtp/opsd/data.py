"""Prompts from a JSONL file, and which of them each optimizer step takes.

Lines are physical lines, ended by a line feed (a carriage return before it is dropped); blank
ones are left out. Every line is checked before any model is loaded.

The order of the prompts is one stream: the permutation of epoch 0, then that of epoch 1, ... Step
`s` takes the entries `s * batch_size` to `(s + 1) * batch_size` of it, so a batch may cross from
one epoch into the next, no prompt is dropped and none comes twice within an epoch. Only the last
batch of the last epoch can be short.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from vocabtp.opsd._schema import DataConfig
from vocabtp.opsd.errors import DataError

_log = logging.getLogger("vocabtp.opsd")
_SHOWN = 5
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row of the prompt file.

    Attributes:
        index: Position among the rows that are used, from 0.
        line: Physical line in the file, from 1.
        prompt: A text, or chat messages of `role` and `content`.
        fields: The whole row, prompt included.
    """

    index: int
    line: int
    prompt: str | list[dict[str, str]]
    fields: dict[str, object]


def load_examples(
    path: str | os.PathLike[str], config: DataConfig, *, need_answer: bool = False
) -> list[Example]:
    """Reads every row of a JSONL file of prompts.

    Args:
        path: The file; UTF-8, with or without a byte order mark.
        config: Field names, and whether broken lines are refused or left out.
        need_answer: Each row must also have `answer_field`, a string or a whole number.

    Raises:
        DataError: The file cannot be read or holds no usable row; or, with `on_error: refuse`,
            at least one line is broken. Names file, line and reason, never a row's content.
    """
    try:
        blob = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{path}: cannot read the prompts: {reason}") from None
    examples: list[Example] = []
    broken: list[tuple[int, str]] = []
    for line, raw in enumerate(blob.removeprefix(_BOM).split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = _parse(raw)
            prompt = _prompt(row, config.prompt_field)
            if need_answer:
                _check_answer(row, config.answer_field)
        except _BrokenLine as error:
            broken.append((line, str(error)))
            continue
        examples.append(Example(index=len(examples), line=line, prompt=prompt, fields=row))
    if not examples and not broken:
        raise DataError(f"{path}: holds no prompt: the file is empty or has only blank lines")
    report_broken(path, broken, len(examples), config)
    return examples


def report_broken(
    path: str | os.PathLike[str],
    broken: Sequence[tuple[int, str]],
    usable: int,
    config: DataConfig,
) -> None:
    """Refuses or notes lines that cannot be used, as `data.on_error` says.

    Args:
        path: The file they are in.
        broken: Line number and reason of each.
        usable: How many other lines can be used.
        config: Says whether to refuse or to skip.

    Raises:
        DataError: With `on_error: refuse` and any broken line, or when no line is usable.
    """
    if not broken:
        return
    shown = "".join(f"\n  {path}:{line}: {reason}" for line, reason in broken[:_SHOWN])
    more = f"\n  and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
    total = len(broken) + usable
    if config.on_error == "refuse" or not usable:
        hint = " (data.on_error: skip leaves such lines out)" if usable else ""
        raise DataError(f"{path}: {len(broken)} of {total} rows cannot be used{hint}:{shown}{more}")
    _log.warning("%s: left out %d of %d rows:%s%s", path, len(broken), total, shown, more)


def answer_of(example: Example, config: DataConfig) -> str:
    """The right answer of a row that was loaded with `need_answer`."""
    return str(example.fields[config.answer_field]).strip()


def total_steps(n: int, batch_size: int, epochs: int, max_steps: int) -> int:
    """Optimizer steps of a run over `n` prompts; `max_steps` of -1 leaves it to the epochs."""
    return max_steps if max_steps > 0 else -(-n * epochs // batch_size)


def batch_indices(
    step: int, batch_size: int, n: int, seed: int, shuffle: bool, *, epochs: int | None = None
) -> list[int]:
    """The prompts of one optimizer step, as a function of its arguments alone.

    Args:
        step: Optimizer step, from 0.
        batch_size: Prompts a step, over all data-parallel ranks.
        n: Prompts in the file.
        seed: `training.seed`.
        shuffle: A new permutation every epoch; else the file's order.
        epochs: Where the stream ends; the step there may be short or empty. None: never.

    Returns:
        Indices below `n`, at most `batch_size` of them.
    """
    start, stop = step * batch_size, (step + 1) * batch_size
    if epochs is not None:
        stop = min(stop, n * epochs)
    indices: list[int] = []
    while start < stop:
        epoch, offset = divmod(start, n)
        take = min(stop - start, n - offset)
        order = _epoch_order(epoch, n, seed) if shuffle else np.arange(n)
        indices += order[offset : offset + take].tolist()
        start += take
    return indices


def _epoch_order(epoch: int, n: int, seed: int) -> np.ndarray[Any, Any]:
    # a Philox stream is the same on every platform and numpy version, and keyed by both numbers
    return np.argsort(np.random.Generator(np.random.Philox(key=[seed, epoch])).random(n))


class _BrokenLine(Exception):
    pass


def _parse(raw: bytes) -> dict[str, object]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BrokenLine(f"invalid UTF-8 at byte {error.start + 1} of the line") from None
    try:
        row = json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _BrokenLine(f"not valid JSON at column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _BrokenLine("nested too deeply") from None
    except ValueError:
        raise _BrokenLine("not valid JSON: a number with too many digits") from None
    if not isinstance(row, dict):
        raise _BrokenLine(f"a row is a JSON object, got {_kind(row)}")
    # only an escape can bring in a surrogate: the decoder refuses an encoded one
    if "\\u" in text and _has_surrogate(row):
        raise _BrokenLine("a lone surrogate (half of a \\u escape pair), which is no text")
    return row


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _BrokenLine(f"the field {_clip(repeated)} is there twice")
    return row


def _no_constant(name: str) -> NoReturn:
    raise _BrokenLine(f"{name} is not a JSON number")


def _has_surrogate(row: object) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _prompt(row: dict[str, object], field: str) -> str | list[dict[str, str]]:
    value = _present(row, field)
    if isinstance(value, str):
        if not value.strip():
            raise _BrokenLine(f"the field {field!r} is empty")
        return value
    if isinstance(value, list):
        return _messages(value, field)
    raise _BrokenLine(f"the field {field!r} must be a string or chat messages, got {_kind(value)}")


def _present(row: dict[str, object], field: str) -> object:
    if field not in row:
        have = ", ".join(_clip(name) for name in list(row)[:_SHOWN]) or "none"
        raise _BrokenLine(f"no field {field!r}; its fields: {have}")
    if row[field] is None:
        raise _BrokenLine(f"the field {field!r} is null")
    return row[field]


def _messages(value: list[object], field: str) -> list[dict[str, str]]:
    if not value:
        raise _BrokenLine(f"the field {field!r} is an empty list")
    messages: list[dict[str, str]] = []
    for i, item in enumerate(value):
        if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
            raise _BrokenLine(f"message {i + 1} of {field!r} needs the keys role and content")
        bad = next((key for key in item if not isinstance(item[key], str)), None)
        if bad is not None:
            raise _BrokenLine(
                f"message {i + 1} of {field!r}: {_clip(bad)} must be a string, "
                f"got {_kind(item[bad])}"
            )
        messages.append(item)
    if messages[-1]["role"] == "assistant":
        raise _BrokenLine(f"the last message of {field!r} is the assistant's, which is generated")
    return messages


def _check_answer(row: dict[str, object], field: str) -> None:
    value = _present(row, field)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _BrokenLine(
            f"the field {field!r} must be a string or a whole number, got {_kind(value)}"
        )
    if isinstance(value, str) and not value.strip():
        raise _BrokenLine(f"the field {field!r} is empty")


def _clip(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:37] + "...")


def _kind(value: object) -> str:
    names: Iterable[tuple[type, str]] = (
        (bool, "a boolean"),
        (int, "a number"),
        (float, "a number"),
        (str, "a string"),
        (list, "a list"),
        (dict, "an object"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "null")
