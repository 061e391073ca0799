"""What `export` needs, and what of a configuration it leaves alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny_models import tiny_model
from tiny_run import recorded, tiny_run
from vocabtp.opsd import cli

# what only other commands use, and a value that `check` refuses
UNUSED = {
    "prompts": "data.path=missing.jsonl",
    "held out": "data.eval_path=missing.jsonl",
    "teacher": "teacher.model_name_or_path=empty",
    "teacher's directory": "teacher.model_name_or_path=/no/such/teacher",
    "payload": "teacher.pinned_bytes=1",
    "lengths": "rollout.max_prompt_length=1000",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the common ids of two widths, and the weights it came to."""
    root = tmp_path_factory.mktemp("run")
    path = tiny_run(root, distillation={"vocab": "common"}, training={"max_steps": 1})
    (root / "empty").mkdir()
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 6}
    for role, vocab in (("student", 40), ("teacher", 44)):
        model = tiny_model("qwen2", vocab=vocab, hidden_size=24, head_dim=4, **sizes)
        model.save_pretrained(root / role)
    return path, recorded(path)["weights"]


@pytest.mark.parametrize("unused", UNUSED.values(), ids=UNUSED)
def test_what_export_does_not_use_is_not_judged(trained, tmp_path, unused):
    path, weights = trained
    assert cli.run(["check", str(path), unused]) == 2
    assert cli.run(["export", str(path), "--output", str(tmp_path / "model"), unused]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.get_output_embeddings().weight.shape[0] == 37
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())
