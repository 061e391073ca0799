"""Which keys may differ between a checkpoint's configuration and the one that continues it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vocabtp.opsd.checkpoint_files import Saved
from vocabtp.opsd.config import Config
from vocabtp.opsd.errors import CheckpointError
from vocabtp.opsd.session import Inputs

# how long, how often, where to, and what only changes rounding, memory or the number of ranks
FREE = frozenset(
    {
        "training.max_steps",
        "training.num_train_epochs",
        "training.logging_steps",
        "training.eval_steps",
        "training.save_steps",
        "training.keep_checkpoints",
        "training.async_save",
        "training.resume",
        "training.save_dir",
        "training.attention",
        "training.activation_checkpointing",
        "training.compile",
        "training.max_skipped_steps",
        "training.micro_batch_size_per_gpu",
        "training.gradient_accumulation_steps",
        "data.answer_field",
        "data.eval_path",
        "data.eval_limit",
        "distillation.chunk_size",
        "distillation.loss_backend",
        "teacher.offload_to_cpu",
        "teacher.payload",
        "teacher.prefetch_bytes",
        "teacher.pinned_bytes",
        "parallel.tp",
        "parallel.nproc",
        "parallel.device",
        "parallel.shard",
        "parallel.engine",
        "parallel.tp_by",
        "parallel.teacher_shard",
        "deepspeed_config",
        # compared by content below
        "data.path",
    }
)


def check_resume(saved: Saved, config: Config, inputs: Inputs, path: str) -> list[str]:
    """Refuse to continue another run than the one that was saved.

    Args:
        saved: What the checkpoint says.
        config: The configuration now.
        inputs: The data now.
        path: The checkpoint's, for messages.

    Returns:
        One line for each key that differs and may.

    Raises:
        CheckpointError: A key that decides what is learnt has changed, or the prompts have.
    """
    before, now = saved.config, config.flat()
    free = FREE
    if config.distillation.loss_scale == "micro_batch_mean":
        # there the micro-batches are part of what is optimised
        free = FREE - {"training.micro_batch_size_per_gpu", "training.gradient_accumulation_steps"}
    changed = _differences(before, now)
    for key, old, new in changed:
        if key not in free:
            raise CheckpointError(
                f"{path} was written with {key} = {old!r}, now it is {new!r}: set it back, or "
                "start anew with another training.save_dir"
            )
    if (old_digest := saved.data.get("train")) != inputs.train.digest:
        raise CheckpointError(
            f"{path} was written with another content of data.path ({inputs.train.path}): "
            f"sha256 {str(old_digest)[:12]}, now {inputs.train.digest[:12]}; restore the file, or "
            "start anew with another training.save_dir"
        )
    return [f"{key} changed from {old!r} to {new!r}" for key, old, new in changed]


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [
        (key, before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
