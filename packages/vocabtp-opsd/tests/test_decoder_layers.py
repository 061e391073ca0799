"""What is done to each decoder layer changes memory and speed, never numbers."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiny_models import tiny_model
from tiny_run import recorded, tiny_run
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.layers import checkpoint_layers, decoder_layers
from vocabtp.opsd.model import evaluating, place_model
from vocabtp.opsd.parallel import Layout, make_layout

TOKENS = torch.arange(60).view(3, 20) % 37
MASK = torch.ones_like(TOKENS)
RESPONSE = torch.arange(20).expand(3, 20) >= 15


class LiveBytes(TorchDispatchMode):
    """The bytes of all tensors that were made under it and still live, and the most at once."""

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.seen.discard(key)
        self.now -= size


def gradients(model):
    """Logits and gradients of one backward from a fixed state of the random generator."""
    torch.manual_seed(5)
    model.module.zero_grad()
    logits = model.response_logits(TOKENS, MASK, RESPONSE)
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.module.parameters() if p.grad is not None)]


def both(kind, layout=None, **changes):
    """A model and its twin whose layers run again."""
    layout = layout or Layout()
    plain, again = (
        place_model(tiny_model(kind, **changes), layout, name="m", trainable=True) for _ in "ab"
    )
    checkpoint_layers(again.module, "m")
    return plain, again


def layer_runs(module):
    """A list that grows with each forward of an attention: the layers' own, and the second ones."""
    runs = []
    for name, part in module.named_modules():
        if name.endswith((".self_attn", ".attn")):
            part.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    return runs


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3, "tied": True}),
        ("qwen3", {"attention_dropout": 0.3, "tied": True}),
        ("gemma2", {}),
        ("llama", {"pad_token_id": 5}),
    ],
)
def test_gradients_are_bit_for_bit_those_of_kept_activations(kind, changes):
    plain, again = both(kind, **changes)
    expected, runs = gradients(plain), layer_runs(again.module)
    found = gradients(again)
    assert len(runs) == 2 * len(decoder_layers(again.module))
    assert len(found) == len(expected) > 20
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # dropout is there, and the second run did draw the first one's
    assert torch.equal(gradients(again)[0], found[0])
    noisy = "pdrop" in str(changes) or "dropout" in str(changes)
    torch.manual_seed(6)
    with torch.no_grad():
        other = again.response_logits(TOKENS, MASK, RESPONSE)
    assert torch.equal(other, found[0]) == (not noisy)


def _peers(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    plain, again = both("qwen3", layout, tied=True)
    for _ in range(2):
        pairs = zip(gradients(again), gradients(plain), strict=True)
        same = [
            torch.equal(*(t.full_tensor() if hasattr(t, "full_tensor") else t for t in pair))
            for pair in pairs
        ]
    return same


def test_tensor_parallel_peers_run_layers_again_alike(ranks):
    """The collectives and the summed gradients of q and k norms in the second run."""
    assert all(all(same) for same in ranks(_peers, 2))


def test_activations_of_one_layer_at_a_time_are_there():
    peaks = {}
    for layers in (2, 8):
        pair = both("llama", num_hidden_layers=layers)
        for name, model in zip(("plain", "again"), pair, strict=True):
            gradients(model)  # gradients are no activations: they are there already
            weights = list(model.module.parameters())
            with LiveBytes([*weights, *(w.grad for w in weights)]) as watch:
                model.response_logits(TOKENS, MASK, RESPONSE).square().sum().backward()
            peaks[name, layers] = watch.peak
    growth = {name: peaks[name, 8] - peaks[name, 2] for name in ("plain", "again")}
    assert peaks["again", 8] < 0.5 * peaks["plain", 8]
    # six more layers: their inputs, [3, 20, 32] fp32 each
    inputs = 6 * TOKENS.numel() * 32 * 4
    assert growth["again"] == inputs
    assert growth["plain"] > 10 * inputs


def test_without_gradients_each_layer_runs_once():
    _, again = both("llama")
    runs = layer_runs(again.module)
    with torch.no_grad(), evaluating(again.module):
        again.response_logits(TOKENS, MASK, RESPONSE)
        _, cache = again.next_logits(TOKENS, MASK)
        again.next_logits(TOKENS[:, :1], torch.ones(3, 21, dtype=torch.long), cache)
    assert runs == [False] * 6


def test_a_run_takes_the_same_updates(tmp_path):
    path = tiny_run(tmp_path, kind="llama", model={"attention_dropout": 0.2})
    plain, again = (
        recorded(
            path,
            f"training.save_dir={tmp_path / str(on)}",
            f"training.activation_checkpointing={on}",
        )
        for on in ("false", "true")
    )
    assert again["losses"] == plain["losses"]
    assert again["weights"].keys() == plain["weights"].keys()
    assert all(torch.equal(again["weights"][name], w) for name, w in plain["weights"].items())


def test_a_model_that_names_no_layers_is_refused():
    module = tiny_model("llama")
    module._no_split_modules = None
    with pytest.raises(ModelError, match=r"m: names no decoder layers.*activation_checkpointing"):
        checkpoint_layers(module, "m")
