"""Rollouts over cut heads against the whole model's `generate`, and across layouts."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tiny_models import tiny_model
from vocabtp.opsd.model import place_model
from vocabtp.opsd.parallel import make_layout
from vocabtp.opsd.rollout import generate

PROMPTS = [[5, 2, 6], [9, 1, 4, 8, 7, 3, 11, 2, 30, 31, 12], [20], [3, 3, 3, 17, 36, 1, 0]]
CASES = [(kind, tied) for kind in ("qwen2", "qwen3", "llama", "gemma2", "gpt2") for tied in (0, 1)]


def settings(**changes):
    defaults = {"max_response_length": 20, "temperature": 0.0, "top_p": 1.0, "top_k": -1}
    return SimpleNamespace(**(defaults | {"n_samples_per_prompt": 1} | changes))


def specials(**changes):
    return SimpleNamespace(**({"eos_ids": (2,), "pad_id": 2, "vocab": 37} | changes))


def answer(model, prompts=PROMPTS, ids=None, seed=7, step=3, special=None, **changes):
    ids = list(range(len(prompts))) if ids is None else ids
    return generate(
        model,
        prompts,
        ids,
        config=settings(**changes),
        specials=special or specials(),
        seed=seed,
        step=step,
    )


def whole_generate(module, prompts, n):
    """The library's own greedy answers on the whole model, the end token included."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    options = {"do_sample": False, "max_new_tokens": n, "eos_token_id": 2, "pad_token_id": 0}
    out = module.generate(input_ids=tokens, attention_mask=mask, **options)[:, width:].tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in out]


def _greedy(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu"))
    torch.manual_seed(rank)
    seen = {}
    for kind, tied in CASES:
        dense, other = tiny_model(kind, tied=bool(tied)), tiny_model(kind, tied=bool(tied))
        expected = whole_generate(dense, PROMPTS, 20)
        model = place_model(other, layout, name=kind, trainable=True)
        model.module.train()
        result = answer(model)
        assert result.responses() == expected, (kind, tied)
        assert all(part.training for part in model.module.modules())
        assert result.truncated == [row[-1] != 2 for row in expected]
        assert result.response_lengths == [len(row) for row in expected]
        seen[kind, tied] = sorted(len(row) for row in expected)
    return seen


def test_greedy_equals_generate_of_the_whole_model(ranks):
    lengths = ranks(_greedy, 2, limit=120)[0]
    # the cases must hold answers that end early beside answers that are cut
    assert any(len(set(case)) > 1 and case[-1] == 20 for case in lengths.values())
    _greedy(0, 1)
