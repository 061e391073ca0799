"""Saved caches are safetensors files: the library itself reads them."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from vocabtp.cache import TeacherLogitCache
from vocabtp.dist import VocabShard


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (0, 7)])
def test_safetensors_reads_what_save_wrote(tmp_path, shape, dtype):
    logits = torch.randn(shape)
    TeacherLogitCache.store(logits, VocabShard(7, 14, 20), dtype).save(tmp_path)
    with safe_open(tmp_path / "entry-00000-columns-7-14.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["rows"]
        assert torch.equal(file.get_tensor("rows"), logits.to(dtype))
