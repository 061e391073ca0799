"""`training.attention`: which kernels really run."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_models import tiny_model
from tiny_run import recorded, tiny_run
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import ConfigError, ModelError
from vocabtp.opsd.loading import place_model
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.trainer import Trainer


class _Operators(TorchDispatchMode):
    """The names of all operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_the_kernels_are_the_ones_that_were_asked_for(tmp_path):
    path = tiny_run(tmp_path, training={"max_steps": 1})
    runs, fused = {}, {}
    for attention in ("sdpa", "math", "eager"):
        save = f"training.save_dir={tmp_path / attention}"
        with _Operators() as ran:
            runs[attention] = recorded(path, f"training.attention={attention}", save)
        fused[attention] = any("flash_attention" in name for name in ran.names)
    assert fused == {"sdpa": True, "math": False, "eager": False}
    assert torch.backends.cuda.flash_sdp_enabled()
    for other in ("math", "eager"):
        assert runs[other]["losses"] == pytest.approx(runs["sdpa"]["losses"], rel=1e-5)


@pytest.mark.parametrize("attention", ["math", "eager"])
def test_evaluation_and_rollout_take_them_too(tmp_path, attention):
    path = tiny_run(tmp_path, held_out=1, training={"attention": attention})
    trainer = Trainer(load_config(path))
    with _Operators() as ran:
        trainer.evaluate()
        trainer.rollout(tmp_path / "answers.jsonl", 1)
    assert not any("flash_attention" in name for name in ran.names)


@pytest.mark.parametrize("override", ["student.dtype=bfloat16", "parallel.device=auto"])
def test_flash_needs_a_gpu_and_half_precision(tmp_path, override):
    path = tiny_run(tmp_path)
    with pytest.raises(ConfigError, match=r"training\.attention is flash, which needs a GPU and"):
        load_config(path, ["training.attention=flash", override])


def test_flash_without_its_package_is_one_line(tmp_path):
    path = tiny_run(tmp_path, student={"dtype": "bfloat16"}, teacher={"dtype": "bfloat16"})
    config = load_config(path, ["training.attention=flash", "parallel.device=auto"])
    with pytest.raises(ModelError, match="flash") as caught:
        Trainer(config).check()
    assert "\n" not in str(caught.value)


WINDOWS = {
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
}


def drawn_batch(generator, vocab):
    """Prompts padded on the left and answers on the right, as rollouts are; some rows empty."""
    count = int(torch.randint(1, 5, (), generator=generator))
    prompts = torch.randint(1, 20, (count, 1), generator=generator)
    answers = torch.randint(0, 9, (count, 1), generator=generator)
    start = int(prompts.max())
    columns = torch.arange(start + int(answers.max()))
    real = (columns >= start - prompts) & (columns < start + answers)
    tokens = torch.randint(0, vocab, real.shape, generator=generator)
    return tokens, real.long(), real & (columns >= start)


def masks_of(module, seen):
    """Note, for each attention, the mask that it is given."""

    def note(_module, args, options):
        seen.append(options.get("attention_mask"))

    for name, part in module.named_modules():
        if name.endswith((".self_attn", ".attn")):
            part.register_forward_pre_hook(note, with_kwargs=True)


# gemma2 caps the scores, which SDPA cannot
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *((kind, "sdpa") for kind in ("qwen2", "qwen3", "llama", "gpt2", "mistral")),
        *((kind, "eager") for kind in ("qwen2", "gemma2", "gpt2", "mistral")),
    ],
)
def test_no_row_of_attention_is_without_a_key(kind, attention):
    """Fused kernels answer such a row with NaN gradients, whatever its upstream gradient is."""
    module = tiny_model(kind, **WINDOWS.get(kind, {}))
    module.set_attn_implementation(attention)
    model = place_model(module, Layout(), name="m", trainable=True)
    module.eval()
    seen, generator = [], torch.Generator().manual_seed(3)
    masks_of(module, seen)
    for _ in range(12):
        tokens, mask, response = drawn_batch(generator, 37)
        actual = model.response_logits(tokens, mask, response)
        assert len(seen) == 2  # one a layer
        for given in seen:
            if given is not None:
                kept = given if given.dtype == torch.bool else given > -1e30
                assert kept.any(dim=-1).all()
        seen.clear()
        # each row alone and without padding
        rows = [
            module(input_ids=ids[real.bool()][None]).logits[0, -1 - int(n) : -1]
            for ids, real, n in zip(tokens, mask, response.sum(1), strict=True)
        ]
        torch.testing.assert_close(actual, torch.cat(rows), rtol=1e-4, atol=1e-5)
        seen.clear()


def test_padding_gets_no_gradient():
    model = place_model(tiny_model("mistral", sliding_window=4), Layout(), name="m", trainable=True)
    tokens, mask, response = drawn_batch(torch.Generator().manual_seed(3), 36)
    assert not mask.all()
    tokens[mask == 0] = 36
    model.response_logits(tokens, mask, response).square().sum().backward()
    grad = model.module.get_input_embeddings().weight.grad
    assert not grad[36].any()
    assert grad.any(dim=1).sum() > 5
