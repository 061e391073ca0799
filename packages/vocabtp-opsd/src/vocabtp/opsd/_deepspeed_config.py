"""DeepSpeed's own configuration beside ours: one setting, one value.

`deepspeed_config` is a DeepSpeed JSON file or its content. What it says that is also a key of ours
(batch sizes, accumulation, clipping, optimizer, schedule, precision, ZeRO stage, tensor
parallelism) is taken over into a key that the configuration leaves open; a key that says something
else is refused with both named. What is left is DeepSpeed's own affair. `resolved` adds our values
again: that is what an engine gets, and no default of DeepSpeed's for any of these remains in it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vocabtp.opsd._application import is_application
from vocabtp.opsd._deepspeed_file import Reading, read_deepspeed
from vocabtp.opsd._deepspeed_keys import READ, REFUSALS, find
from vocabtp.opsd._deepspeed_settings import (
    BATCH,
    STAGES,
    check_engine,
    check_head,
    check_optimizer,
    equal,
    schedule_notices,
    settings,
    take_over_autotp,
)
from vocabtp.opsd._deepspeed_types import check_types
from vocabtp.opsd._wording import shown

if TYPE_CHECKING:
    from vocabtp.opsd.config import Config

__all__ = ["read_deepspeed", "resolved", "take_over", "unresolved"]

_STAGE_OF = {"none": 0, "zero2": 2, "zero3": 3}


def take_over(reading: Reading, values: dict[str, Any], where: dict[str, str]) -> list[str]:
    """Put what it says into our sections; leave the rest of it as `values["deepspeed_config"]`.

    Returns:
        Notices, a line each.

    Raises:
        ConfigError: The two say different things, or it says what there is no key for.
    """
    notices = schedule_notices(reading, values)
    check_optimizer(reading)
    check_engine(reading, values)
    for setting in settings(values):
        value = find(reading.values, setting.theirs)
        if value is None:
            continue
        try:
            wanted = setting.convert(value)
        except ValueError as error:
            raise reading.error(setting.theirs, str(error)) from None
        section, _, key = setting.ours.partition(".")
        ours = values.setdefault(section, {}).get(key)
        if ours is None:
            values[section][key] = wanted
            where[setting.ours] = reading.place(setting.theirs)
        elif not equal(ours, wanted):
            both = f"{setting.ours} is {shown(ours)} ({where[setting.ours]})"
            if not (is_application(values) and setting.theirs in BATCH):
                raise reading.error(
                    setting.theirs,
                    f"is {shown(value)}, but {both}: they are one setting; make them agree or "
                    "leave one out",
                )
            notices.append(f"{reading.prefix}{setting.theirs} {shown(value)} is not used: {both}")
    check_head(reading, values)
    notices += check_types(reading, values)
    if find(reading.values, "hybrid_engine.enabled"):
        notices.append(
            f"{reading.prefix}hybrid_engine is not used: answers come from this package's own loop"
        )
    notices += take_over_autotp(reading, values, where)
    if values.get("training", {}).get("max_grad_norm") is None:
        notices.append(
            "gradient_clipping and training.max_grad_norm are not set: gradients are clipped to "
            "the norm 1.0; training.max_grad_norm 0 turns clipping off"
        )
    values["deepspeed_config"] = _rest(reading.values)
    return notices


def resolved(rest: dict[str, Any], config: Config) -> dict[str, Any]:
    """The whole configuration for DeepSpeed: what was left of it, with our values in it.

    Batch sizes are in it when all three are known, as DeepSpeed counts them: sequences.
    """
    out = copy.deepcopy(rest)
    t = config.training
    micro, steps, train = (
        t.micro_batch_size_per_gpu,
        t.gradient_accumulation_steps,
        t.train_batch_size,
    )
    if None not in (micro, steps, train):
        out["train_micro_batch_size_per_gpu"] = micro
        out["gradient_accumulation_steps"] = steps
        out["train_batch_size"] = (train or 1) * config.rollout.n_samples_per_prompt
    out["gradient_clipping"] = t.max_grad_norm
    out.setdefault("bf16", {})["enabled"] = config.student.dtype == "bfloat16"
    zero = out.setdefault("zero_optimization", {})
    if STAGES.get(zero.get("stage")) != config.parallel.shard:
        zero["stage"] = _STAGE_OF[config.parallel.shard]
    if config.parallel.tp > 1:
        head = config.distillation.loss_backend != "dense"
        out["tensor_parallel"] = {
            "autotp_size": config.parallel.tp,
            "vocab_parallel_lm_head": head,
        }
    return out


def unresolved(full: dict[str, Any], config: Config) -> dict[str, Any]:
    """What `resolved` was given: the configuration without what our keys say."""
    out = copy.deepcopy(full)
    for key in (*BATCH, "gradient_clipping", "tensor_parallel"):
        out.pop(key, None)
    owned = {"bf16": ["enabled"]}
    if find(full, "zero_optimization.stage") == _STAGE_OF[config.parallel.shard]:
        owned["zero_optimization"] = ["stage"]
    for section, keys in owned.items():
        held = out.get(section, {})
        for key in keys:
            held.pop(key, None)
        if not held:
            out.pop(section, None)
    return out


def _rest(values: dict[str, Any]) -> dict[str, Any]:
    """What there is no key of ours for."""
    out = {key: copy.deepcopy(value) for key, value in values.items() if key not in READ}
    for refusal in REFUSALS:  # all of them are off
        *above, key = refusal.key.split(".")
        held = find(out, above[0]) if above else out
        if isinstance(held, dict):
            held.pop(key, None)
    owned = {"bf16": ["enabled"], "data_types": ["param_dtype"]}
    # stage 1 has no name of its own among ours
    if find(out, "zero_optimization.stage") != 1:
        owned["zero_optimization"] = ["stage"]
    for section, keys in owned.items():
        for key in keys:
            out.get(section, {}).pop(key, None)
    return {key: value for key, value in out.items() if value != {}}
