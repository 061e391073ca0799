"""DeepSpeed's keys whose sense depends on the student's type, its ZeRO stage and the optimizer.

DeepSpeed itself checks some of them when an engine is made, which is after the models were loaded,
and takes others without a word. Only `parallel.engine: deepspeed` hands them over.
"""

from __future__ import annotations

from typing import Any

from vocabtp.opsd._deepspeed_file import Reading
from vocabtp.opsd._deepspeed_keys import find
from vocabtp.opsd._wording import shown

# every name that DeepSpeed has for a type
_DTYPES = {
    name: names[0]
    for names in (
        ("float32", "fp32", "float", "torch.float32"),
        ("bfloat16", "bf16", "torch.bfloat16"),
        ("float16", "fp16", "half", "torch.float16"),
    )
    for name in names
}


def dtype_named(value: Any) -> str | None:
    """The type that DeepSpeed reads from `value`, as our keys name it; None for no float type."""
    return _DTYPES.get(value) if isinstance(value, str) else None


def student_dtype(value: Any) -> str:
    """`data_types.param_dtype` as `student.dtype`."""
    found = dtype_named(value)
    if found not in ("bfloat16", "float32"):
        raise ValueError(f"must be bf16 or fp32 (student.dtype), got {shown(value)}")
    return found


def check_types(reading: Reading, values: dict[str, Any]) -> list[str]:
    """What of DeepSpeed's types and norms its engine can do for this student.

    Args:
        reading: What DeepSpeed's configuration says.
        values: Our sections, with what was taken over from it.

    Returns:
        Notices of what changes results, a line each.

    Raises:
        ConfigError: A value with which no engine can be made, or gradients are lost.
    """
    if values.get("parallel", {}).get("engine") != "deepspeed":
        return []
    stage = _stage(reading, values)
    norm = find(reading.values, "zero_optimization.compute_grad_norm")
    if norm is False and not stage:
        raise reading.error(
            "zero_optimization.compute_grad_norm",
            "is false, which DeepSpeed has with stage 1 and 2 only: leave it out; gradient norms "
            "are made by the trainer at every stage",
        )
    untested = find(reading.values, "zero_allow_untested_optimizer")
    sgd = values.get("training", {}).get("optimizer") == "sgd"
    if untested is not None and not untested and stage and sgd:
        raise reading.error(
            "zero_allow_untested_optimizer",
            f"is {shown(untested)}, with which DeepSpeed refuses training.optimizer sgd at stage "
            f"{stage}: leave it out, or take adamw or stage 0",
        )
    return _check_sums(reading) + _check_accumulation(reading, values, stage)


def _check_sums(reading: Reading) -> list[str]:
    """The type in which gradients are summed over the data-parallel ranks."""
    key = "communication_data_type"
    if (value := find(reading.values, key)) is None:
        return []
    name = value.lower() if isinstance(value, str) else value
    if name not in ("fp32", "bf16"):
        why = ": there is no loss scale that would keep small gradients from being 0 in it"
        raise reading.error(
            key, f"must be fp32 or bf16, got {shown(value)}{why if name == 'fp16' else ''}"
        )
    if name == "fp32":
        return []
    return [
        f"{reading.prefix}{key} {shown(value)}: gradients are rounded to bfloat16 and summed so "
        "over the data-parallel ranks; left out, they are summed in float32"
    ]


def _check_accumulation(reading: Reading, values: dict[str, Any], stage: int) -> list[str]:
    """The type in which gradients of micro-batches add up."""
    key = "data_types.grad_accum_dtype"
    if (value := find(reading.values, key)) is None:
        return []
    found = dtype_named(value)
    if values.get("student", {}).get("dtype") == "float32":
        allowed, whose = ["float32"], "a float32 student"
    else:
        allowed = ["bfloat16", "float32"] if stage == 2 else ["bfloat16"]
        whose = f"a bfloat16 student and ZeRO stage {stage}"
    if found not in allowed:
        more = "" if stage == 2 or "float32" in allowed else ", or take stage 2"
        raise reading.error(
            key,
            f"must be {' or '.join(allowed)} with {whose}, got {shown(value)}: leave it out{more}",
        )
    if found == "float32" or stage != 2:
        return []
    return [
        f"{reading.prefix}{key} {shown(value)}: gradients of micro-batches add up in bfloat16; "
        "left out, they add up in float32"
    ]


def _stage(reading: Reading, values: dict[str, Any]) -> int:
    """The student's: 0, 1 or 2."""
    if values.get("parallel", {}).get("shard", "none") == "none":
        return 0
    return 1 if find(reading.values, "zero_optimization.stage") == 1 else 2
