"""The settings that DeepSpeed's configuration and ours both have: how theirs reads as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vocabtp.opsd._deepspeed_file import Reading
from vocabtp.opsd._deepspeed_keys import find
from vocabtp.opsd._deepspeed_types import student_dtype
from vocabtp.opsd._fields import numeric_string
from vocabtp.opsd._wording import shown

STAGES = {0: "none", 1: "zero2", 2: "zero2", 3: "zero3"}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
_OFFLOADING = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param")
_PLANS_OF_AUTOTP = (
    "partition_config",
    "preset_model",
    "injection_policy_tuple",
    "replace_with_kernel_inject",
    "kernel_inject",
)
# values of DeepSpeed's optimizers that the update rules here have too
_FIXED = {
    "adam_w_mode": (True,),
    "bias_correction": (True, 1),
    "amsgrad": (False,),
    "momentum": (0, 0.0),
    "dampening": (0, 0.0),
    "nesterov": (False,),
}


class Setting(NamedTuple):
    """One setting that both configurations have."""

    theirs: str
    ours: str
    convert: Callable[[Any], Any]  # raises ValueError with the end of a line that names the key


def settings(values: dict[str, Any]) -> list[Setting]:
    samples = values.get("rollout", {}).get("n_samples_per_prompt", 1)

    def prompts(sequences: Any) -> Any:
        if type(sequences) is type(samples) is int and samples > 1:
            if sequences % samples:
                raise ValueError(
                    f"counts sequences; {sequences} is no multiple of "
                    f"rollout.n_samples_per_prompt {samples}"
                )
            return sequences // samples
        return sequences

    return [
        Setting("train_batch_size", "training.train_batch_size", prompts),
        Setting("train_micro_batch_size_per_gpu", "training.micro_batch_size_per_gpu", _same),
        Setting("gradient_accumulation_steps", "training.gradient_accumulation_steps", _same),
        Setting("gradient_clipping", "training.max_grad_norm", _same),
        Setting("optimizer.type", "training.optimizer", _optimizer),
        Setting("optimizer.params.lr", "training.learning_rate", _same),
        Setting("optimizer.params.weight_decay", "training.weight_decay", _same),
        Setting("optimizer.params.betas", "training.adam_betas", _same),
        Setting("optimizer.params.eps", "training.adam_eps", _same),
        Setting("scheduler.type", "training.lr_scheduler", _schedule),
        Setting("scheduler.params.warmup_max_lr", "training.learning_rate", _same),
        Setting("scheduler.params.warmup_num_steps", "training.warmup_steps", _same),
        Setting("bf16.enabled", "student.dtype", lambda on: "bfloat16" if on else "float32"),
        Setting("data_types.param_dtype", "student.dtype", student_dtype),
        Setting("zero_optimization.stage", "parallel.shard", _stage),
        Setting("tensor_parallel.autotp_size", "parallel.tp", lambda n: 1 if n == 0 else n),
    ]


def _same(value: Any) -> Any:
    return value


def _optimizer(value: Any) -> Any:
    if (name := _OPTIMIZERS.get(str(value).lower())) is None:
        raise ValueError(f"must be AdamW, Adam or SGD (training.optimizer), got {shown(value)}")
    return name


def _schedule(value: Any) -> Any:
    if value not in _SCHEDULES:
        raise ValueError(
            f"must be one of {', '.join(_SCHEDULES)} (training.lr_scheduler), got {shown(value)}"
        )
    return _SCHEDULES[value]


def _stage(value: Any) -> Any:
    if type(value) is not int or value not in STAGES:
        raise ValueError(f"must be 0, 1, 2 or 3, got {shown(value)}")
    return STAGES[value]


def check_optimizer(reading: Reading) -> None:
    for key, allowed in _FIXED.items():
        value = find(reading.values, f"optimizer.params.{key}")
        if value is not None and value not in allowed:
            raise reading.error(
                f"optimizer.params.{key}",
                f"must be {shown(allowed[0])}, got {shown(value)}: training.optimizer is AdamW, "
                "or SGD without momentum",
            )


def check_engine(reading: Reading, values: dict[str, Any]) -> None:
    """What the DeepSpeed engine cannot do; the torch engine has stage 3, and does not offload."""
    if values.get("parallel", {}).get("engine") != "deepspeed":
        return
    if find(reading.values, "zero_optimization.stage") == 3:
        raise reading.error(
            "zero_optimization.stage",
            "is 3, but parallel.engine is 'deepspeed', with which the student takes 0, 1 or 2 (and "
            "parallel.teacher_shard zero3 partitions the teacher); parallel.engine torch has "
            "stage 3",
        )
    for key in _OFFLOADING:
        value = find(reading.values, f"zero_optimization.{key}")
        if value and not (isinstance(value, dict) and value.get("device") in (None, "none")):
            raise reading.error(
                f"zero_optimization.{key}",
                "is not supported: weights and optimizer stay on the device; "
                "teacher.offload_to_cpu and parallel.teacher_shard make room",
            )


def schedule_notices(reading: Reading, values: dict[str, Any]) -> list[str]:
    """What of DeepSpeed's schedules there is no key for; only a straight warm-up from 0."""
    params = find(reading.values, "scheduler.params") or {}
    kind = find(reading.values, "scheduler.type")
    for key in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
        if params.get(key, 0):
            raise reading.error(
                f"scheduler.params.{key}",
                f"must be 0, got {shown(params[key])}: the learning rate starts and ends at 0",
            )
    if (last := params.get("last_batch_iteration", -1)) != -1:
        raise reading.error(
            "scheduler.params.last_batch_iteration",
            f"must be -1, got {shown(last)}: the schedule begins with the run, and a resumed run "
            "goes on at its own step",
        )
    if (shape := params.get("warmup_type", "linear")) != "linear":
        raise reading.error(
            "scheduler.params.warmup_type", f"must be linear, got {shown(shape)}: warm-up is linear"
        )
    if kind is None:
        return []
    name = "scheduler.params.warmup_num_steps"
    training = values.get("training", {})
    open_steps = "warmup_num_steps" not in params and training.get("warmup_steps") is None
    if open_steps and name not in reading.auto:
        raise reading.error(
            "scheduler", "has no warmup_num_steps, of which DeepSpeed would make 1000: set it"
        )
    limit, total = training.get("max_steps", -1), params.get("total_num_steps")
    if total is not None and limit not in (-1, total):
        raise reading.error(
            "scheduler.params.total_num_steps",
            f"is {shown(total)}, but training.max_steps is {shown(limit)}: the schedule ends with "
            "the run; make them agree or leave one out",
        )
    return [
        f"{reading.prefix}scheduler is read as training.lr_scheduler and training.warmup_steps: "
        "the warm-up is linear, and the schedule is as long as the run"
    ]


def take_over_autotp(reading: Reading, values: dict[str, Any], where: dict[str, str]) -> list[str]:
    """Let AutoTP cut the models where its size is given, unless our key says otherwise.

    Returns:
        Notices, a line each.

    Raises:
        ConfigError: AutoTP is to cut by something else than the models' own plans.
    """
    asked = find(reading.values, "tensor_parallel.autotp_size") not in (None, 0, 1)
    parallel = values.setdefault("parallel", {})
    if parallel.get("engine") == "deepspeed" and asked and parallel.get("tp_by") is None:
        parallel["tp_by"] = "autotp"
        where["parallel.tp_by"] = reading.place("tensor_parallel.autotp_size")
    others = {
        key: value
        for key, value in (find(reading.values, "tensor_parallel") or {}).items()
        if key not in ("autotp_size", "vocab_parallel_lm_head")
    }
    if parallel.get("tp_by") == "autotp":
        for key in _PLANS_OF_AUTOTP:
            if others.get(key):
                raise reading.error(
                    f"tensor_parallel.{key}",
                    "is not supported: AutoTP cuts by the plan that a model carries, of which it "
                    "is known that all gradients are right; leave it out",
                )
    if not others:
        return []
    names = ", ".join(f"{reading.prefix}tensor_parallel.{key}" for key in others)
    return [f"{names}: not used, models are cut by the plan that they carry"]


def check_head(reading: Reading, values: dict[str, Any]) -> None:
    """Whole heads under tensor parallelism are a route of the loss here."""
    head = find(reading.values, "tensor_parallel.vocab_parallel_lm_head")
    backend = values.get("distillation", {}).get("loss_backend", "vocab_parallel")
    if head is None or values.get("parallel", {}).get("tp", 1) == 1:
        return
    if bool(head) == (backend == "dense"):
        raise reading.error(
            "tensor_parallel.vocab_parallel_lm_head",
            f"is {shown(head)}, but distillation.loss_backend is {shown(backend)}: dense keeps "
            "whole heads, vocab_parallel and gathered cut them",
        )


def equal(ours: Any, theirs: Any) -> bool:
    return bool(_plain(ours) == _plain(theirs))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return numeric_string(value)
