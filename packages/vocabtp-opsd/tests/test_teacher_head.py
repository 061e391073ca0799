"""The head that stands for the model behind its last state, and what it must not stand for."""

from __future__ import annotations

import pytest
import torch

import vocabtp.opsd.teacher_head as teacher_head
from tiny_models import tiny_model
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.loading import place_model
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.teacher import Teacher
from vocabtp.opsd.teacher_head import check_head, response_states

# what each does behind its head: nothing, soft cap, divisor, factor, bias
MODELS = {
    "llama": {},
    "gpt2": {},
    "gemma2": {},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
    "phi": {},
}


def model_of(kind, **changes):
    module = tiny_model(kind, **(MODELS[kind] | changes))
    return place_model(module, Layout(), name="teacher 't'", trainable=False)


def batch():
    tokens = torch.randint(3, 37, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    response = torch.zeros_like(tokens, dtype=torch.bool)
    response[:, 5:8] = True
    return tokens, mask, response


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_the_head_makes_the_models_logits(kind):
    model = model_of(kind)
    check_head(model)
    states, head = response_states(model, *batch())
    assert states.shape == (6, 32)
    torch.testing.assert_close(head(states), model.response_logits(*batch()), rtol=1e-5, atol=1e-6)
    # what it looked at is gone from the model, and what it refers to is the model's
    assert not model.module.get_output_embeddings()._forward_pre_hooks
    assert head.weight.data_ptr() == model.module.get_output_embeddings().weight.data_ptr()
    assert (head.bias is None) == (kind != "phi")


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_a_model_that_does_more_is_refused(monkeypatch, kind):
    """A configuration that does not name it: the soft cap shows at the larger state only."""
    model = model_of(kind, **({"final_logit_softcapping": 60.0} if kind == "gemma2" else {}))
    Teacher(model, payload="hidden")
    monkeypatch.setattr(teacher_head, "scale_and_softcap", lambda config: (1.0, None))
    Teacher(model, payload="logits")
    with pytest.raises(ModelError, match=r"teacher 't': .* set teacher\.payload to logits"):
        Teacher(model, payload="hidden")


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_model_that_masks_ids_is_refused(monkeypatch, value):
    model = model_of("llama")
    forward = model.module.forward

    def masked(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits[..., 3] = value
        return out

    monkeypatch.setattr(model.module, "forward", masked)
    with pytest.raises(ModelError, match=r"set teacher\.payload to logits"):
        Teacher(model, payload="hidden")


def test_a_pass_that_fails_leaves_no_hook(monkeypatch):
    model = model_of("llama")
    monkeypatch.setattr(model.module.lm_head, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        response_states(model, *batch())
    assert not model.module.lm_head._forward_pre_hooks
