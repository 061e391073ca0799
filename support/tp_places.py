"""Where a test of sharded ops runs: eager, on interpreted Triton, on several GPUs.

A test asks for the fixture `tp` and says with `at` for which numbers of ranks; it is then run once
for each of them in each place.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch


class Place(NamedTuple):
    """What a rank needs to know of where it runs."""

    name: str
    backend: str  # of vocabtp.kernels
    device: str

    @property
    def interpreted(self) -> bool:
        """Whether a row costs milliseconds, so that a test cannot try everything on everything."""
        return self.name == "interpreted"


EAGER = Place("eager", "eager", "cpu")
INTERPRETED = Place("interpreted", "triton", "cpu")


def _gpus():
    """Triton compiled, an accelerator for each rank."""
    kind = torch.accelerator.current_accelerator()
    return Place("gpus", "triton", "cuda" if kind is None else kind.type)


def at(eager=(), interpreted=(2, 3), gpus=(2,)):
    """Run a test that takes `tp` with these numbers of ranks in each place."""
    found = [(EAGER, world) for world in eager]
    found += [(INTERPRETED, world) for world in interpreted]
    found += [(_gpus(), world) for world in gpus]
    params = [
        pytest.param(
            (place, world),
            id=f"{place.name}-{world}",
            marks=[pytest.mark.gpu] if place.name == "gpus" else [],
        )
        for place, world in found
    ]
    return pytest.mark.parametrize("tp", params, indirect=True)


class Ranks:
    """Starts ranks in one place; `fn(rank, world, place, *args)`."""

    def __init__(self, ranks, place, world):
        self._ranks, self.place, self.world = ranks, place, world

    def __call__(self, fn, *args, limit=60.0):
        """What each rank returned, in rank order."""
        device = None if self.place.device == "cpu" else self.place.device
        return self._ranks(
            fn,
            self.world,
            self.place,
            *args,
            limit=limit,
            backend=self.place.backend,
            device=device,
        )
