"""The addition task of the demo: how sums are written, and who may see which.

Each number is zero-padded to a fixed width and written with its ones digit first, so that 347 + 85
is the prompt `743+580=` and its answer 432 is `2340`: a left-to-right model meets every carry
before it needs it. The SHA-256 of the prompt alone decides on which side of the split a sum falls.

Run `python task.py` to write the three files again.
"""

import hashlib
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
OPERAND_DIGITS = 3
ANSWER_DIGITS = OPERAND_DIGITS + 1

# of 100 hash buckets, one each is set aside; everything else may be trained on
SIDES = {98: "heldout", 99: "untouched"}
FILE_SIZES = {"train": 16_000, "heldout": 500, "untouched": 500}


def write_number(value: int, digits: int) -> str:
    """`value` in decimal, zero-padded to `digits`, ones digit first."""
    return f"{value:0{digits}d}"[::-1]


def read_number(text: str) -> int:
    """The number that `write_number` wrote.

    Raises:
        ValueError: `text` is not made of digits.
    """
    return int(text[::-1])


def write_prompt(a: int, b: int) -> str:
    """The prompt that asks for `a + b`."""
    return f"{write_number(a, OPERAND_DIGITS)}+{write_number(b, OPERAND_DIGITS)}="


def write_answer(a: int, b: int) -> str:
    """The one answer that counts as right for `write_prompt(a, b)`."""
    return write_number(a + b, ANSWER_DIGITS)


def prompt_hash(prompt: str) -> int:
    """The first 64 bits of the prompt's SHA-256: a fixed, well mixed number."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")


def side(prompt: str) -> str:
    """`train`, `heldout` or `untouched`: fixed for each prompt, whatever else there is."""
    return SIDES.get(prompt_hash(prompt) % 100, "train")


def split_sums() -> dict[str, list[tuple[int, int]]]:
    """Every sum of two operands, by side, each side in the order of its prompts' hashes."""
    limit = 10**OPERAND_DIGITS
    sides: dict[str, list[tuple[int, int, int]]] = {name: [] for name in FILE_SIZES}
    for a in range(limit):
        for b in range(limit):
            prompt = write_prompt(a, b)
            sides[side(prompt)].append((prompt_hash(prompt), a, b))
    return {name: [(a, b) for _, a, b in sorted(found)] for name, found in sides.items()}


def file_text(sums: list[tuple[int, int]]) -> str:
    """The JSONL text of some sums, one `{"prompt": ..., "answer": ...}` a line."""
    rows = ({"prompt": write_prompt(a, b), "answer": write_answer(a, b)} for a, b in sums)
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_files(folder: Path = HERE) -> dict[str, list[tuple[int, int]]]:
    """Write `train.jsonl`, `heldout.jsonl` and `untouched.jsonl`: the lowest hashes of each side.

    Returns:
        Every sum of each side, not only those in the files.
    """
    sides = split_sums()
    for name, size in FILE_SIZES.items():
        text = file_text(sides[name][:size])
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
    return sides


if __name__ == "__main__":
    for name, sums in write_files().items():
        print(f"{name}.jsonl: {FILE_SIZES[name]} of {len(sums)} sums")
