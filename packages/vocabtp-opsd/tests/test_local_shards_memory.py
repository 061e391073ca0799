"""How much host memory a rank takes to read its part of a model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tiny_checkpoints import save, section
from tiny_models import tiny_config
from vocabtp.opsd.config import ParallelConfig
from vocabtp.opsd.loading import load_model
from vocabtp.opsd.parallel import make_layout

BIG = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 11,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def memory(key):
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def loaded_in(rank, world, tp, dtype, small, big):
    layout = make_layout(ParallelConfig(tp=tp, device="cpu", shard="zero3"))
    # code, threads and buffers of the first
    load_model(section(small, dtype), layout, trainable=True)
    before = memory("VmRSS")
    model = load_model(section(big, dtype), layout, trainable=True)
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.module.parameters()]
    share = sum(part.untyped_storage().nbytes() for part in parts)
    # the most since the process began: never less than what this load needed
    return memory("VmHWM") - before, share


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "float32")])
def test_a_rank_needs_its_share_of_host_memory_and_little_more(tmp_path, ranks, tp, dtype):
    """A part of one tensor more, whether tensor-parallel or data-parallel ranks cut it.

    Data-parallel ones keep float32 of a bfloat16 student.
    """
    from transformers import AutoModelForCausalLM

    vocab = 4001
    with torch.device("meta"):
        big = AutoModelForCausalLM.from_config(tiny_config("llama", vocab=vocab, **BIG))
    state = {k: torch.full(v.shape, 0.5) for k, v in big.state_dict().items()}
    big.config.save_pretrained(tmp_path / "big")
    save_file(state, tmp_path / "big" / "model.safetensors", {"format": "pt"})
    total = sum(v.nbytes for v in state.values())
    assert total > 180e6
    del state
    save(tmp_path / "small")
    largest = vocab * BIG["hidden_size"] * 4
    paths = (tmp_path / "small", tmp_path / "big")
    for peak, share in ranks(loaded_in, 2, tp, dtype, *paths, limit=120):
        assert share < 0.52 * total
        # what is more is one part's pages: mostly 0.4 to 1 times the largest tensor, once 2.9;
        # less than the share, where some of it lies in memory that the process had free
        assert 0.9 * share <= peak <= 1.3 * share + largest
