"""Triton's interpreter as the tests use it: kernels on the CPU, program by program."""

from __future__ import annotations

import os

import torch


def switch_on() -> None:
    """Without an accelerator, have kernels interpreted; before anything imports triton."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def patch(setattr=setattr) -> None:
    """Round to bf16 as chips do, and prepare the language once a module.

    Args:
        setattr: how to replace an attribute, pytest's `monkeypatch.setattr` for example.
    """
    from triton.runtime import interpreter

    assert os.environ.get("TRITON_INTERPRET") == "1"
    setattr(interpreter.InterpreterBuilder, "cast_impl", _nearest(interpreter))
    setattr(interpreter.InterpretedFunction, "__call__", _prepared(interpreter))


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
