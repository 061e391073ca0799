"""Triton's interpreter as the tests use it: kernels on the CPU, program by program.

What compute-sanitizer's memcheck does on a chip is done here for every launch: an access outside of
the tensors that a kernel was given is an error.
"""

from __future__ import annotations

import os

import torch


def switch_on() -> None:
    """Without an accelerator, have kernels interpreted; before anything imports triton."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def patch(setattr=setattr) -> None:
    """Round to bf16 as chips do, prepare the language once a module, check every address.

    Args:
        setattr: how to replace an attribute, pytest's `monkeypatch.setattr` for example.
    """
    from triton.runtime import interpreter

    assert os.environ.get("TRITON_INTERPRET") == "1"
    setattr(interpreter.InterpreterBuilder, "cast_impl", _nearest(interpreter))
    setattr(interpreter.InterpretedFunction, "__call__", _prepared(interpreter))
    spans: list[tuple[int, int]] = []
    setattr(interpreter.GridExecutor, "_init_args_hst", _given(interpreter, spans))
    for name, mask in (("create_masked_load", 0), ("create_masked_store", 1)):
        setattr(interpreter.InterpreterBuilder, name, _bounded(interpreter, name, mask, spans))


def _nearest(interpreter):
    """`cast_impl` that rounds to the nearest bf16; the interpreter's own cuts bits off."""
    import numpy as np
    import triton.language as tl

    old = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst):
        if src.dtype.scalar != tl.float32 or dst.scalar != tl.bfloat16:
            return old(self, src, dst)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        kept = np.where(np.isnan(src.data), (bits >> 16) | 0x40, rounded)
        return interpreter.TensorHandle(kept.astype(np.uint16), dst.scalar)

    return cast_impl


def _prepared(interpreter):
    """Calls of device functions; the interpreter's own patch the language at each, half its time.

    A kernel's launch has patched `triton.language` already. The modules of triton that see another
    of its modules need it once: nothing takes that back.
    """
    seen = set()

    def call(self, *args, **kwargs):
        module = self.fn.__module__
        if module not in seen:
            seen.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    return call


def _given(interpreter, spans):
    """`_init_args_hst` that puts the first and the last byte of a launch's tensors into `spans`."""
    old = interpreter.GridExecutor._init_args_hst

    def init(self, args, kwargs):
        found = old(self, args, kwargs)
        spans.clear()
        for x in found[0]:
            if isinstance(x, torch.Tensor) and x.numel():
                last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
                spans.append((x.data_ptr(), x.data_ptr() + x.element_size() * (last + 1)))
        return found

    return init


def _bounded(interpreter, name, mask, spans):
    """A load or store that raises where its addresses are in no tensor of the launch.

    `mask` is the mask's place behind the pointers.
    """
    import numpy as np

    old = getattr(interpreter.InterpreterBuilder, name)

    def access(self, ptrs, *rest):
        used = ptrs.data[np.broadcast_to(rest[mask].data, ptrs.data.shape).astype(bool)]
        if used.size:
            first = int(used.min())
            end = int(used.max()) + ptrs.get_element_ty().primitive_bitwidth // 8
            if not any(start <= first and end <= stop for start, stop in spans):
                raise IndexError(f"{name}: bytes {first} to {end} are in none of {spans}")
        return old(self, ptrs, *rest)

    return access
