"""The DeepSpeedExamples OPSD application's configuration: its keys that have another name here.

Most of its keys keep their name and meaning. The others are read where they say nothing new, and
otherwise refused with the key to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vocabtp.opsd._wording import shown
from vocabtp.opsd.errors import ConfigError

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OWN_LOOP = "answers come from this package's own loop"
_VLLM = f"is a setting of vLLM, but {_OWN_LOOP}; take it out"


def _off(value: Any) -> bool:
    return value in (None, False)


def _never(value: Any) -> bool:
    return False


# the value that says nothing here, and what to do about any other
_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rollout.use_graph_capture": (
        _off,
        f"captures the hybrid engine's decoding, but {_OWN_LOOP}; set it to false or take it out",
    ),
    "rollout.continuous_batch_size": (
        _off,
        "is a setting of the hybrid engine: training.micro_batch_size_per_gpu is how many answers "
        "are made at a time",
    ),
    "rollout.tensor_parallel_size": (
        _never,
        "is parallel.tp here, for rollout and training alike",
    ),
    "rollout.gpus": (_never, _VLLM),
    "rollout.gpu_memory_utilization": (_never, _VLLM),
    "rollout.vllm_dtype": (_never, _VLLM),
}


def is_application(values: dict[str, Any]) -> bool:
    """Whether the configuration was written for the application."""
    return bool(values.get("rollout", {}).get("engine") == "hybrid_engine")


def read_application(values: dict[str, Any], where: dict[str, str]) -> list[str]:
    """Put the application's own keys into ours, in place.

    Returns:
        Notices, a line each.

    Raises:
        ConfigError: A key that asks for what there is not, or is another key here.
    """
    for name, (says_nothing, text) in _KEYS.items():
        section, _, key = name.partition(".")
        if key in (held := values.get(section, {})):
            if not says_nothing(held[key]):
                raise ConfigError(f"{where[name]}: {name} {text} (got {shown(held[key])})")
            del held[key]
    for section in ("student", "teacher"):
        dtype = values.get(section, {}).get("dtype")
        if isinstance(dtype, str) and dtype in _DTYPES:
            values[section]["dtype"] = _DTYPES[dtype]
    _read_teacher_tp(values, where)
    notices = []
    if is_application(values):
        notices.append("rollout.engine: hybrid_engine is read as local")
        if values.get("data", {}).get("chat_template") is None:
            notices.append(
                "data.chat_template null leaves a prompt that is a string as it is; "
                "data.chat_template: tokenizer makes it a user's message, as the DeepSpeedExamples "
                "application does"
            )
    return notices


def _read_teacher_tp(values: dict[str, Any], where: dict[str, str]) -> None:
    """Student and teacher are cut over the same ranks."""
    teacher = values.get("teacher", {})
    if "autotp_size" not in teacher:
        return
    size = teacher.pop("autotp_size")
    if size in (None, 0, 1):
        return
    tp = values.setdefault("parallel", {}).setdefault("tp", size)
    where.setdefault("parallel.tp", where["teacher.autotp_size"])
    if tp != size:
        raise ConfigError(
            f"{where['teacher.autotp_size']}: teacher.autotp_size is {shown(size)}, but "
            f"parallel.tp is {shown(tp)} ({where['parallel.tp']}): student and teacher share "
            "parallel.tp; make them agree or leave one out"
        )
