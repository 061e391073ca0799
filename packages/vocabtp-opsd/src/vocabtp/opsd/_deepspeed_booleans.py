"""DeepSpeed's switches: it reads many ways to write true and false, and our checks read one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

# those that a check or a key of ours depends on, as far as DeepSpeed's own classes read them: what
# it reads by truth alone ("no" is on there) is not among them
SWITCHES: dict[str, frozenset[str]] = {
    section: frozenset(names.split())
    for section, names in {
        "bf16": "enabled bf16_master_weights_and_grads bf16_optimizer_states",
        "fp16": "enabled",
        "hybrid_engine": "enabled enable_cuda_graph",
        "tensor_parallel": "vocab_parallel_lm_head replace_with_kernel_inject kernel_inject",
        "compile": "deepcompile autoep_non_moe",
        "zero_optimization": "compute_grad_norm cpu_offload cpu_offload_param legacy_stage1 "
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
    }.items()
}
_BOOLEAN = TypeAdapter(bool)


def plain_switches(values: dict[str, Any]) -> None:
    """Make booleans of "no", "off", 0 and the like, in place, where DeepSpeed does.

    What is no boolean to DeepSpeed either stays as it is.
    """
    for section, names in SWITCHES.items():
        held = values.get(section)
        if not isinstance(held, dict):
            continue
        for name in names & held.keys():
            with suppress(ValidationError):
                held[name] = _BOOLEAN.validate_python(held[name])
