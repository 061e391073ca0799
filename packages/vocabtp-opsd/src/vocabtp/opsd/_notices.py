"""What a configuration says without effect: a line each, for the user's eyes only."""

from __future__ import annotations

from typing import Any

from vocabtp.opsd._schema import Sections


def notices_of(config: Sections) -> list[str]:
    """What the configuration says without effect, before it is completed by other keys."""
    notices = []
    r = config.rollout
    if r.temperature == 0 and (r.top_p < 1 or r.top_k > 0):
        notices.append("rollout.top_p and top_k have no effect with rollout.temperature 0 (greedy)")
    if config.deepspeed_config is not None and config.parallel.engine == "torch":
        notices.append(
            "parallel.engine is torch: deepspeed_config is read for what keys of the sections say "
            f"too{_unread(config.deepspeed_config)}; parallel.engine=deepspeed runs DeepSpeed"
        )
    t = config.training
    own = config.deepspeed_config or {}
    if "activation_checkpointing" in own and not t.activation_checkpointing:
        notices.append(
            "deepspeed_config: activation_checkpointing has no effect here: "
            "training.activation_checkpointing does it"
        )
    if 0 < t.max_steps <= t.warmup_steps:
        notices.append(
            f"training.warmup_steps {t.warmup_steps}: the learning rate never reaches its peak in "
            f"{t.max_steps} steps"
        )
    return notices


def _unread(own: dict[str, Any]) -> str:
    names = [
        f"{key}.{inner}" if isinstance(value, dict) else key
        for key, value in own.items()
        for inner in (value if isinstance(value, dict) else [""])
    ]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f", not for {', '.join(names[:4])}{more}" if names else ""
