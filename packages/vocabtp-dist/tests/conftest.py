"""The ops run in several places: `tp` starts ranks in one of them, see support/tp_places.py."""

import pytest
import torch

import triton_interpreter
from tp_places import Ranks

triton_interpreter.switch_on()
_left_out = []


@pytest.fixture
def tp(request, ranks):
    return Ranks(ranks, *request.param)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what wants more accelerators than there are; the summary says so."""
    there = torch.accelerator.device_count()
    out = [i for i in items if i.get_closest_marker("gpu") and _wants(i) > there]
    _left_out.extend(out)
    config.hook.pytest_deselected(items=out)
    items[:] = [i for i in items if i not in out]


def _wants(item):
    tp = getattr(item, "callspec", None) and item.callspec.params.get("tp")
    return tp[1] if tp else 0


def pytest_terminal_summary(terminalreporter):
    if _left_out:
        there = torch.accelerator.device_count()
        terminalreporter.write_line(
            f"vocabtp.dist over several GPUs: {len(_left_out)} tests did not run, they want "
            f"{min(map(_wants, _left_out))} GPUs and there {'is' if there == 1 else 'are'} {there}"
        )
