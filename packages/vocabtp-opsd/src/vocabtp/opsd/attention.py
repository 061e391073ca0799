"""Which attention kernels a run uses: `training.attention`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

# what Hugging Face calls them
_IMPLEMENTATIONS = {"math": "sdpa", "flash": "flash_attention_2"}


def implementation(attention: str) -> str:
    """The name that a Hugging Face model is loaded with."""
    return _IMPLEMENTATIONS.get(attention, attention)


def attention_kernels(attention: str) -> AbstractContextManager[None]:
    """While entered, SDPA takes no fused kernel if `attention` is `math`.

    PyTorch keeps this choice for the process, so that it also holds where autograd's own threads
    run a layer again.
    """
    if attention == "math":
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()
