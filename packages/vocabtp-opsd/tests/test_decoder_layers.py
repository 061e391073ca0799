"""What is done to each decoder layer changes memory and speed, never numbers."""

from __future__ import annotations

import json
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vocabtp.opsd.layers as layers_module
import vocabtp.opsd.loading as loading_module
from tiny_models import tiny_model
from tiny_run import recorded, tiny_run
from vocabtp.opsd.errors import ConfigError, ModelError
from vocabtp.opsd.layers import checkpoint_layers, compile_layers, decoder_layers
from vocabtp.opsd.loading import place_model
from vocabtp.opsd.model import evaluating
from vocabtp.opsd.parallel import Layout, make_layout

AGAIN = "training.activation_checkpointing=true"
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


def test_a_run_that_drops_activations_takes_the_same_updates(tmp_path):
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
    with pytest.raises(ModelError, match=r"m: does not name its .*layers.*training\.activation_"):
        checkpoint_layers(module, "m")
    with pytest.raises(ModelError, match=r"m: does not name its .*layers.*training\.compile"):
        compile_layers(module, "m", trained=True)


@pytest.fixture
def compiler(monkeypatch, request):
    """What runs compile with: no C++ is involved, and each compilation counts."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(getattr(request, "param", "eager"))
    monkeypatch.setattr(
        loading_module, "compile_layers", partial(layers_module.compile_layers, backend=counter)
    )
    yield counter
    torch._dynamo.reset()


FULL = {"marks": pytest.mark.full}
KINDS = [
    pytest.param("eager", "llama", {}, [AGAIN], id="llama"),
    # gradients of what is compiled take three times as long to compile
    pytest.param("aot_eager", "llama", {}, [AGAIN], id="llama-gradients", **FULL),
    pytest.param("aot_eager", "mistral", {"sliding_window": 4}, [], id="mistral", **FULL),
    pytest.param("aot_eager", "gpt2", {}, [], id="gpt2", **FULL),
]


# parts of torch that only the compiler imports, and what it hides of its own accord
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(("compiler", "kind", "model", "options"), KINDS, indirect=["compiler"])
def test_a_compiled_run_takes_the_same_updates(tmp_path, compiler, kind, model, options):
    """Prompts and answers of many lengths, and evaluations; some layers run again as well."""
    path = tiny_run(
        tmp_path,
        kind=kind,
        model={"num_hidden_layers": 2} | model,
        rollout={"temperature": 1.0},
        held_out=2,
        training={"micro_batch_size_per_gpu": 2, "train_batch_size": 6},
    )
    rows = [{"prompt": f"{i}+" * (1 + i % 5)} for i in range(18)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = recorded(path, f"training.save_dir={tmp_path / 'plain'}")
    assert compiler.frame_count == 0
    overrides = ["training.compile=true", f"training.save_dir={tmp_path / 'compiled'}"]
    run = recorded(path, *overrides, *options)
    assert len({rollout.tokens.shape for _, _, rollout in run["rollouts"]}) > 6
    # student and teacher: not once for each width, nor once for each layer
    assert 2 <= compiler.frame_count <= 6
    assert run["answers"] == plain["answers"]
    assert run["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(run["weights"][name], weight, rtol=1e-5, atol=1e-6)
    after = plain["result"].after.numbers()
    assert run["result"].after.numbers() == pytest.approx(after, rel=1e-5)


def test_decoding_is_left_as_it_is(compiler):
    student, teacher = (
        place_model(tiny_model("llama"), Layout(), name="m", trainable=trained)
        for trained in (True, False)
    )
    loading_module.compile_layers(student.module, "s", trained=True)
    loading_module.compile_layers(teacher.module, "t", trained=False)
    with torch.no_grad():
        for model in (student, teacher):
            for width in (5, 6):
                _, cache = model.next_logits(TOKENS[:, :width], MASK[:, :width])
                model.next_logits(TOKENS[:, :1], MASK[:, : width + 1], cache)
            model.idle_logits()
        student.response_logits(TOKENS, MASK, RESPONSE)
    student.idle_logits()
    assert compiler.frame_count == 0


def test_no_compiler_is_one_line(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def none():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ConfigError, match=r"^training\.compile needs a C\+\+ compiler"):
        layers_module.compile_layers(tiny_model("llama"), "m", trained=True)
