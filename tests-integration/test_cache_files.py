"""Saved caches are safetensors files: the library itself reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vocabtp.cache import TeacherLogitCache
from vocabtp.dist import VocabShard

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (0, 7)])
def test_safetensors_reads_what_save_wrote(tmp_path, shape, dtype):
    logits = torch.randn(shape)
    TeacherLogitCache.store(logits, VocabShard(7, 14, 20), dtype).save(tmp_path)
    with safe_open(tmp_path / "entry-00000-columns-7-14.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["rows"]
        assert torch.equal(file.get_tensor("rows"), logits.to(dtype))


def test_the_tests_that_docs_name_are_there():
    named = re.findall(r"`([\w/-]+\.py)::(\w+)`", (ROOT / "docs/cache.md").read_text())
    assert len(named) > 40
    for file, test in named:
        path = ROOT / file if "/" in file else ROOT / "packages/vocabtp-cache/tests" / file
        assert f"\ndef {test}(" in path.read_text(), f"{file}::{test}"
