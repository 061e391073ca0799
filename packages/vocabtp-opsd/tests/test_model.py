"""Cut models against the whole model: response logits and the gradient of every parameter."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tiny_models import tiny_model
from vocabtp.dist import GroupExchange
from vocabtp.kernels import logprobs
from vocabtp.opsd.loading import place_model
from vocabtp.opsd.model import evaluating
from vocabtp.opsd.parallel import Layout, make_layout


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
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    for kind, micro_batches, changes in GRADIENT_CASES:
        model = assert_as_dense(layout, kind, micro_batches, **changes)
        assert model.shard.world_size == world
        assert model.tied == changes.get("tied", False)
        with pytest.raises(RuntimeError, match=r"rollout\.generate"):
            model.module.generate(torch.ones(1, 2, dtype=torch.long))


def test_gradients_and_logits_equal_dense_at_tp2(ranks):
    ranks(_gradients, 2, limit=120)


WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4}


def _wider(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    # 37 columns over 4: 10, 10, 10, 7
    assert_as_dense(layout, "qwen3", 2, tied=True, **WIDE)
    model = assert_as_dense(layout, "llama", 2, vocab=1031, pad_token_id=3, **WIDE)
    assert_as_dense(layout, "gpt2", 2, tied=True, vocab=10)
    return model.shard.start, model.shard.end, model.shard.global_size


def test_gradients_and_logits_equal_dense_at_tp4(ranks):
    bounds = ranks(_wider, 4, limit=120)
    assert bounds == [(0, 258, 1031), (258, 516, 1031), (516, 774, 1031), (774, 1031, 1031)]


def _whole_heads(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    for kind, changes in (("qwen3", {"tied": True}), ("llama", {}), ("gpt2", {"tied": True})):
        model = assert_as_dense(layout, kind, 2, cut_vocab=False, **changes)
        assert model.shard.tp_group is None
        assert (model.shard.start, model.shard.end) == (0, 37)
        assert not isinstance(model.module.get_output_embeddings().weight, DTensor)
        cut = [p for p in model.module.parameters() if isinstance(p, DTensor)]
        assert bool(cut) == (kind != "gpt2")


def test_whole_heads_over_a_cut_backbone_equal_dense(ranks):
    ranks(_whole_heads, 2, limit=120)


# B46: logits = E[ids] @ E.T, rows 0-1 of E on rank 0, rows 2-3 on rank 1
E = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]])
B46_GRAD = [[1.8336, -1.0906], [-0.7528, 0.1749], [-0.3280, 1.9507], [-0.2907, -0.8251]]


def _tied(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    module = tiny_model("gpt2", tied=True, n_embd=2, n_head=1, n_layer=0, vocab=4)
    module.transformer.ln_f = torch.nn.Identity()
    with torch.no_grad():
        module.transformer.wpe.weight.zero_()
        module.transformer.wte.weight.copy_(E)
    model = place_model(module, layout, name="tied", trainable=True)
    module.eval()  # no dropout
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    assert embedding.weight is head.weight
    assert [n for n, _ in module.named_parameters() if "wte" in n or "lm_head" in n] == [
        "transformer.wte.weight"
    ]
    # two sequences of one token, each followed by the token that is scored
    tokens = torch.tensor([[0, 1], [2, 3]])
    response = torch.tensor([[False, True], [False, True]])
    logits = model.response_logits(tokens, torch.ones_like(tokens), response)
    sharded = {"exchange": GroupExchange(layout.tp_group), "vocab_size": 4}
    targets = torch.tensor([1, 3])
    loss = -logprobs(logits, targets, vocab_start=model.shard.start, **sharded).sum()
    loss.backward()
    storage = head.weight.to_local().untyped_storage().data_ptr()
    grad = head.weight.grad.full_tensor()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert embedding.weight is head.weight
    assert head.weight.to_local().untyped_storage().data_ptr() == storage
    # only this rank's rows stay in memory
    assert head.weight.to_local().untyped_storage().nbytes() == 2 * 2 * 4
    return loss.item(), grad.tolist(), head.weight.full_tensor().tolist()


def test_a_tied_head_is_one_parameter_with_both_gradients(ranks):
    """B46."""
    for loss, grad, after in ranks(_tied, 2):
        assert abs(loss - 4.370192) < 1e-5
        assert (torch.tensor(grad) - torch.tensor(B46_GRAD)).abs().max() < 1e-4
        assert (torch.tensor(after) - (E - 0.5 * torch.tensor(B46_GRAD))).abs().max() < 1e-4


def _no_rows(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    for kind in ("qwen3", "gpt2"):
        model = place_model(tiny_model(kind), layout, name=kind, trainable=True)
        tokens, mask, response = batch([(5, 0), (3, 0)], 37, 1)
        logits = model.response_logits(tokens, mask, response)
        assert logits.shape == (0, model.shard.width)
        logits.sum().backward()
        head = model.module.get_output_embeddings().weight
        assert not whole(head.grad).any()


def test_a_batch_without_response_tokens_has_zero_gradients(ranks):
    ranks(_no_rows, 2)
    _no_rows(0, 1)


def test_only_response_rows_meet_the_head():
    model = place_model(tiny_model("llama"), Layout(), name="m", trainable=True)
    seen = []
    head = model.module.get_output_embeddings()
    head.register_forward_hook(lambda _m, args, _out: seen.append(args[0].shape))
    model.response_logits(*batch(BATCHES[0][0], 37, 1))
    assert seen == [(1, 10, 32)]
    assert len(head._forward_pre_hooks) == 0


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_padding_may_be_anywhere(kind):
    """Also inside a row, and the whole of one: each row's tokens as if alone."""
    model = place_model(tiny_model(kind), Layout(), name="m", trainable=False)
    g = torch.Generator().manual_seed(2)
    mask = torch.rand(5, 14, generator=g) < 0.6
    mask[3] = False
    tokens = torch.randint(0, 37, mask.shape, generator=g)
    response = mask & (mask.cumsum(-1) > 2)
    expected = []
    for ids, real, marked in zip(tokens, mask, response, strict=True):
        if real.any():
            logits = model.module(input_ids=ids[real][None]).logits[0]
            expected.append(logits[:-1][marked[real][1:]])
    assert sum(map(len, expected)) == response.sum() > 15
    actual = model.response_logits(tokens, mask.long(), response)
    torch.testing.assert_close(actual, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_masks_that_nothing_predicts_or_of_other_shapes_are_refused():
    model = place_model(tiny_model("llama"), Layout(), name="m", trainable=True)
    tokens, mask, response = batch([(2, 2)], 37, 1)
    for column in (0, 2):
        # the first column, and the first token behind padding
        mask[0, :column], marked = 0, response.clone()
        marked[0, column] = True
        with pytest.raises(ValueError, match="first token of a row"):
            model.response_logits(tokens, mask, marked)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="marks padding"):
        model.response_logits(tokens, mask, response)
    with pytest.raises(ValueError, match=r"\[1, 4\], \[1, 4\] and \[1, 3\]"):
        model.response_logits(tokens, mask, response[:, 1:])


def _foreign_ids(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    model = place_model(tiny_model("llama"), layout, name="m", trainable=True)
    before = dict(model.module.get_input_embeddings()._parameters)
    for bad in (37, -1):
        tokens = torch.tensor([[1, bad, 2]])
        with pytest.raises(IndexError, match=r"not in \[0, 37\)"):
            model.response_logits(tokens, torch.ones_like(tokens), tokens == 2)
    # the weight that the lookup had swapped is back
    assert model.module.get_input_embeddings()._parameters["weight"] is before["weight"]


def test_ids_outside_the_vocabulary_are_errors_on_every_rank(ranks):
    ranks(_foreign_ids, 2)


def test_evaluating_restores_each_submodules_own_mode():
    module = tiny_model("gpt2").train()
    module.transformer.h[1].eval()
    modes = [part.training for part in module.modules()]
    assert True in modes
    assert False in modes
    with contextlib.suppress(KeyError), evaluating(module):
        assert not any(part.training for part in module.modules())
        raise KeyError
    assert [part.training for part in module.modules()] == modes
