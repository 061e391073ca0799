"""Cut models against the whole model: response logits and the gradient of every parameter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tiny_models import tiny_model
from vocabtp.opsd.model import place_model
from vocabtp.opsd.parallel import make_layout


def batch(lengths, vocab, seed):
    """Left-padded prompts, right-padded responses; pad id 0 also stands inside prompts."""
    g = torch.Generator().manual_seed(seed)
    prompt, response = max(p for p, _ in lengths), max(r for _, r in lengths)
    tokens = torch.randint(0, vocab, (len(lengths), prompt + response), generator=g)
    cols = torch.arange(prompt + response)
    p, r = torch.tensor(lengths).T[:, :, None]
    mask = (cols >= prompt - p) & (cols < prompt + r)
    return tokens * mask, mask.long(), mask & (cols >= prompt)


BATCHES = [([(5, 3), (2, 6), (4, 0), (1, 1)], 1), ([(3, 2), (7, 4)], 2)]


def dense_logits(module, tokens, mask, response):
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = module(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    rows, cols = response.nonzero(as_tuple=True)
    return logits[rows, cols - 1]


def accumulate(logits_of, vocab, columns, micro_batches):
    """Backward of a fixed random function of the logits; returns the logits of each micro-batch."""
    seen = []
    for lengths, seed in BATCHES[:micro_batches]:
        logits = logits_of(*batch(lengths, vocab, seed))
        g = torch.Generator().manual_seed(seed + 10)
        upstream = torch.randn(logits.shape[0], vocab, generator=g)[:, columns]
        (logits * upstream).sum().backward()
        seen.append(logits.detach())
    return seen


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_as_dense(layout, kind, micro_batches, cut_vocab=True, **changes):
    dense, other = tiny_model(kind, **changes), tiny_model(kind, **changes)
    vocab = dense.config.vocab_size
    expected = accumulate(lambda *b: dense_logits(dense, *b), vocab, slice(None), micro_batches)
    model = place_model(other, layout, name=kind, trainable=True, cut_vocab=cut_vocab)
    model.module.eval()
    columns = slice(model.shard.start, model.shard.end)
    actual = accumulate(model.response_logits, vocab, columns, micro_batches)
    for a, e in zip(actual, expected, strict=True):
        assert type(a) is torch.Tensor
        torch.testing.assert_close(a, e[:, columns], rtol=1e-4, atol=1e-5)
    for name, p in model.module.named_parameters():
        assert getattr(p.grad, "placements", None) == getattr(p, "placements", None), name
    grads = {name: whole(p.grad) for name, p in model.module.named_parameters()}
    largest = max(p.grad.abs().max() for p in dense.parameters())
    assert grads.keys() == dict(dense.named_parameters()).keys()
    for name, p in dense.named_parameters():
        error = (grads[name] - p.grad).abs().max()
        # k_proj.bias has an exact gradient of zero: judge it by the model's scale
        allowed = 2e-5 * p.grad.abs().max() + 1e-6 * largest
        assert error <= allowed, f"{kind} {changes} x{micro_batches} {name}: {error} > {allowed}"
    return model


GRADIENT_CASES = [
    ("qwen2", 2, {}),
    ("qwen2", 1, {"tied": True, "vocab": 1031}),
    ("qwen3", 1, {}),
    ("qwen3", 2, {"tied": True}),
    ("llama", 2, {"tied": True}),
    ("llama", 2, {"pad_token_id": 20}),
    ("llama", 2, {"pad_token_id": 20, "tied": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", 1, {"pad_token_id": 5}),
    ("gemma2", 2, {"tied": True}),
    ("gpt2", 2, {"tied": True}),
    ("gpt2", 1, {}),
]


def _gradients(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu"))
    for kind, micro_batches, changes in GRADIENT_CASES:
        model = assert_as_dense(layout, kind, micro_batches, **changes)
        assert model.shard.world_size == world
        assert model.tied == changes.get("tied", False)
        with pytest.raises(RuntimeError, match=r"rollout\.generate"):
            model.module.generate(torch.ones(1, 2, dtype=torch.long))


def test_gradients_and_logits_equal_dense_at_tp2(ranks):
    ranks(_gradients, 2, limit=120)
