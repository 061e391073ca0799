"""What tests of the cache give an accelerator: rows in several layouts, work, held streams."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 6016


def device() -> torch.device:
    """The accelerator; without one these tests fail, and they only run when asked for."""
    found = torch.accelerator.current_accelerator()
    assert found is not None, "the gpu tests need an accelerator"
    return torch.device(found.type, torch.accelerator.current_device_index())


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device=device(), dtype=torch.float32)


def busy() -> None:
    """Queue some tens of milliseconds of work, so that a missing wait shows."""
    a = torch.ones(8192, 8192, device=device(), dtype=torch.bfloat16)
    for _ in range(20):
        a = a @ a


def sleep(stream: torch.Stream | None = None, ms: float = 30.0) -> torch.Event:
    """Hold a stream - the current one - for some milliseconds; an event behind that."""
    stream = stream or torch.accelerator.current_stream()
    with stream:
        if device().type == "cuda":
            torch.cuda._sleep(int(ms * 2_000_000))
        else:
            busy()
        event = torch.Event(device())
        event.record(stream)
    return event


LAYOUTS = {
    "contiguous": lambda x: x,
    "shifted": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1))[..., :-1, :],
    "transposed": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    "every other column": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
}
