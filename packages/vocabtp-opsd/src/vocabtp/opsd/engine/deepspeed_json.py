"""What DeepSpeed itself is told: the configuration's `deepspeed_config`, made fit for the engine.

A value that both sides have must agree, so that there is one truth for each; what is left out is
filled in, so that no default of DeepSpeed's stands in for a setting of the run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from vocabtp.opsd._deepspeed_types import dtype_named
from vocabtp.opsd.config import Config
from vocabtp.opsd.errors import ConfigError
from vocabtp.opsd.parallel import Layout

_STAGES = {"none": (0,), "zero2": (2, 1)}
# where parameters, gradients or optimizer state are not where the engine looks for them
_UNFIT = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "zenflow")


def stage_of(config: Config) -> int:
    """The student's ZeRO stage: 0, 1 or 2.

    Raises:
        ConfigError: Another stage, or another one than `parallel.shard` names.
    """
    shard = config.parallel.shard
    stages = _STAGES.get(shard, ())
    stage = _section(config.deepspeed_config or {}, "zero_optimization").get("stage", "auto")
    if stages and stage == "auto":
        return stages[0]
    if isinstance(stage, bool) or stage not in stages:
        raise ConfigError(
            f"parallel.shard is {shard} and zero_optimization.stage in deepspeed_config is "
            f"{stage!r}: with parallel.engine deepspeed the student takes none (stage 0) or zero2 "
            "(stage 1 or 2)"
        )
    return int(stage)


def complete(config: Config, layout: Layout) -> dict[str, Any]:
    """What `deepspeed.initialize` gets for the student.

    Args:
        config: The run's configuration, batch sizes filled in.
        layout: The ranks.

    Raises:
        ConfigError: A setting that the engine cannot use, or a value that contradicts `config`.
    """
    out = copy.deepcopy(config.deepspeed_config or {})
    training = config.training
    micro = training.micro_batch_size_per_gpu or 1
    steps = training.gradient_accumulation_steps or 1
    half = config.student.dtype == "bfloat16"
    ours: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (micro, "training.micro_batch_size_per_gpu"),
        "gradient_accumulation_steps": (steps, "training.gradient_accumulation_steps"),
        "train_batch_size": (micro * steps * layout.dp, "that of the sequences of a step"),
        "gradient_clipping": (training.max_grad_norm, "training.max_grad_norm"),
        "gradient_allreduce_op": ("mean", "what the losses are scaled for"),
    }
    for key, (value, name) in ours.items():
        if out.setdefault(key, value) not in (value, "auto"):
            raise ConfigError(f"deepspeed_config: {key} is {out[key]!r}, but {value!r} is {name}")
        out[key] = value
    # left to the engine: one norm, over all ranks and parts, decides and clips at every stage
    out["gradient_clipping"] = 0.0
    # a loss is its share of the step's: the mean over the copies would have to be multiplied away,
    # and with an upstream gradient of 1 the loss has its gradients already
    out["gradient_allreduce_op"] = "sum"
    for name, enabled in (("bf16", half), ("fp16", False)):
        section = dict(_section(out, name))
        asked = section.get("enabled", "auto")
        if asked not in (enabled, "auto"):
            raise ConfigError(
                f"deepspeed_config: {name}.enabled is {asked!r}, but student.dtype is "
                f"{config.student.dtype}"
            )
        out[name] = section | {"enabled": enabled}
    # the models are cut already
    size = _section({"": out.pop("tensor_parallel", None)}, "").get("autotp_size", layout.tp)
    if size not in (layout.tp, "auto"):
        raise ConfigError(
            f"deepspeed_config: tensor_parallel.autotp_size is {size!r}, but parallel.tp is "
            f"{layout.tp}"
        )
    out["zero_optimization"] = _zero(out) | {"stage": (stage := stage_of(config))}
    out.setdefault("zero_allow_untested_optimizer", True)
    # a timer would wait for the device at every token of a rollout
    out.setdefault("timers", {"throughput": {"enabled": False}})
    if half:
        # sums of many small numbers: in fp32, as the torch engine's
        out.setdefault("communication_data_type", "fp32")
        if stage == 2:
            # what else the section says leaves this as it is
            own = _section(out, "data_types")
            dtype = own.get("grad_accum_dtype") or "fp32"
            out["data_types"] = {**own, "grad_accum_dtype": dtype}
        elif (
            dtype_named(_section(out, "data_types").get("grad_accum_dtype") or "bf16") != "bfloat16"
        ):
            raise ConfigError(
                f"deepspeed_config: data_types.grad_accum_dtype has to be bf16 with ZeRO stage "
                f"{stage} and a bfloat16 student: leave it out, or take stage 2"
            )
    return out


def _zero(given: dict[str, Any]) -> dict[str, Any]:
    zero = _section(given, "zero_optimization")
    for key in _UNFIT:
        value = zero.get(key)
        if value and not (isinstance(value, dict) and value.get("device") in (None, "none")):
            raise ConfigError(
                f"deepspeed_config: zero_optimization.{key} is not supported: leave it out; "
                "weights and optimizer stay on the device, and teacher.offload_to_cpu and "
                "parallel.teacher_shard are what makes room"
            )
    return {key: v for key, v in zero.items() if key not in _UNFIT and v != "auto"}


def frozen(config: Config, layout: Layout) -> dict[str, Any]:
    """What `deepspeed.initialize` gets for a teacher whose weights are partitioned.

    With the settings of stage 3 that `deepspeed_config` has.
    """
    given = _section(config.deepspeed_config or {}, "zero_optimization")
    own = {k: v for k, v in given.items() if k.startswith("stage3_") and v != "auto"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": layout.dp,
        "bf16": {"enabled": config.teacher.dtype == "bfloat16"},
        "fp16": {"enabled": config.teacher.dtype == "float16"},
        "zero_optimization": own | {"stage": 3},
        "timers": {"throughput": {"enabled": False}},
    }


@contextmanager
def values_named() -> Iterator[None]:
    """Run `deepspeed.initialize`; a value that DeepSpeed cannot read is told with its key.

    Raises:
        ConfigError: On every rank, as all of them read the same.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"deepspeed_config: DeepSpeed ({error.title}) cannot use {key} {first['input']!r}: "
            f"{first['msg']}"
        ) from error


def _section(given: dict[str, Any], key: str) -> dict[str, Any]:
    found = given.get(key)
    if found is None or found == "auto":
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"deepspeed_config: {key} must be an object, got {found!r}")
    return found
