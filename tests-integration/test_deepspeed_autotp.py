"""Models as AutoTP cuts them, and what it leaves out."""

from types import SimpleNamespace

import torch

from tiny_models import tiny_model
from vocabtp.opsd.errors import UserError

INSTEAD = "set parallel.tp_by to plan"


def autotp(rank, world, folder):
    """Bounds and weights of a model cut with and without its weights; refusals."""
    from vocabtp.opsd.config import StudentConfig
    from vocabtp.opsd.engine.deepspeed_start import start
    from vocabtp.opsd.loading import load_model, place_model
    from vocabtp.opsd.parallel import make_layout

    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    start(layout)
    from deepspeed.module_inject import auto_tp, layers

    def place(trainable=True, kind="qwen3", tied=True):
        module = tiny_model(kind, tied=tied)
        options = {"name": "m", "trainable": trainable, "tp_by": "autotp"}
        return place_model(module, layout, **options)

    section = StudentConfig(model_name_or_path=str(folder), dtype="float32")
    read = load_model(section, layout, trainable=True, tp_by="autotp")
    found = {"trained": place(), "frozen": place(trainable=False), "read": read}
    weights = {key: dict(model.module.named_parameters()) for key, model in found.items()}
    out = {}
    for key, model in found.items():
        head = model.module.get_output_embeddings()
        assert isinstance(head, layers.VocabParallelLinear)
        own = (head.vocab_start_index, head.vocab_end_index, head.vocab_size, head.mp_group)
        shard = model.shard
        assert (shard.start, shard.end, shard.global_size, shard.tp_group) == own
        assert shard.width == head.weight.shape[0]
        assert model.tied
        out[key] = [shard.start, shard.end]
        for name, weight in weights["trained"].items():
            assert weight.equal(weights[key][name])
            assert weights[key][name].requires_grad == (key != "frozen")
    norms = [hasattr(p, "_ds_grad_allreduce_registered") for p in weights["read"].values()]
    assert sum(norms) == 4

    def without(owner, method, instead, **options):
        held = getattr(owner, method)
        setattr(owner, method, lambda *args: instead(held, *args))
        try:
            place(**options)
        except UserError as error:
            return str(error)
        finally:
            setattr(owner, method, held)

    def skip(name):
        return lambda held, self, child, path: (
            child if path.endswith(name) else held(self, child, path)
        )

    def columns(held, self, child, path):
        return layers.LinearLayer(child, self.mp_group)

    cut = (auto_tp.AutoTP, "_replace_with_config")
    summed = (auto_tp.AutoTP, "register_replicated_grad_hooks", lambda *args: None)
    out["refusals"] = [
        without(*summed),
        without(*summed, kind="qwen2") or without(*summed, trainable=False),
        without(*cut, skip("0.self_attn.o_proj")),
        without(*cut, skip("lm_head"), tied=False),
        without(*cut, columns, tied=False),
        without(*summed, kind="gpt2"),
        without(*summed, kind="flint"),
        without(*cut, lambda held: None),
    ]
    return out


def blocks(rank, world):
    """Logits of a model that splits its fused projection by a size of its own, and the whole's."""
    from vocabtp.opsd.loading import place_model
    from vocabtp.opsd.parallel import make_layout

    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    tokens = torch.arange(12).view(2, 6)
    response = torch.ones_like(tokens, dtype=torch.bool)
    response[:, 0] = False
    whole, module = (tiny_model("codegen", rotary_dim=4) for _ in range(2))
    expected = whole(input_ids=tokens).logits[:, :-1].flatten(0, 1).detach()
    model = place_model(module, layout, name="m", trainable=False, tp_by="autotp")
    logits = model.response_logits(tokens, torch.ones_like(tokens), response)
    return logits, expected[:, model.shard.start : model.shard.end]


def test_sizes_of_whole_blocks_stay_as_they_are(ranks):
    for logits, expected in ranks(blocks, 2):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_what_autotp_makes_of_a_model(ranks, tmp_path):
    tiny_model("qwen3", tied=True).save_pretrained(tmp_path)
    results = ranks(autotp, 2, tmp_path)
    for result, columns in zip(results, [[0, 19], [19, 37]], strict=True):
        assert [result[key] for key in ("trained", "frozen", "read")] == [columns] * 3
    norm, nothing, whole, head, other, planless, styles, version = results[0]["refusals"]
    q_norm = "model.layers.0.self_attn.q_norm.weight"
    assert norm == f"m: AutoTP does not sum the gradient of {q_norm} over the ranks: " + INSTEAD
    assert nothing is None
    assert whole == (
        "m: AutoTP makes Linear of model.layers.0.self_attn.o_proj, where the model's plan asks "
        "for LinearAllreduce: " + INSTEAD
    )
    assert "makes Linear of lm_head, where the model's plan asks for VocabPar" in head
    assert "makes LinearLayer of model.layers.0.self_attn.o_proj" in other
    assert version.startswith("parallel.tp_by is autotp, but the AutoTP of DeepSpeed 0.")
    assert planless.startswith("m: carries no tensor-parallel plan")
    assert styles.startswith("m: AutoTP refuses it: HuggingFace tp_plan contains unsupported")
    assert styles.endswith(f"'packed_colwise']: {INSTEAD}")
    assert results[0]["refusals"] == results[1]["refusals"]
