"""Small runs of the trainer, and when one of them took the steps of another."""

import json

import pytest
import torch

from tiny_run import tiny_run

# two layers; 37 ids and 15 units of 30 cut unevenly
MODEL = {"num_hidden_layers": 2}
CLIP = 0.05
# steps of 4, 4 and 1 prompts: in the last one a copy has a micro-batch less than the other
PROMPTS, STEPS = 9, 3
TRAINING = {"max_steps": -1, "micro_batch_size_per_gpu": 1, "max_grad_norm": CLIP}


def small_run(root, **sections):
    """A run whose answers end at different lengths, sampled so that greedy ties cannot matter."""
    training = TRAINING | {"weight_decay": 0.1} | sections.pop("training", {})
    return tiny_run(
        root,
        **{"tied": True, "held_out": 3, "prompts": PROMPTS, "model": MODEL} | sections,
        rollout={"temperature": 1.0, "max_response_length": 6},
        training=training,
    )


def close(mine, theirs, rtol=1e-5, atol=1e-6):
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=rtol, atol=atol)


def same(mine, theirs):
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def agrees(run, truth, tolerance=2e-5):
    """The same steps as the dense process, to rounding."""
    assert run["losses"] == pytest.approx(truth["losses"], rel=tolerance)
    for mine, theirs in zip(run["metrics"], truth["metrics"], strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
        assert mine["response_tokens"] == theirs["response_tokens"]
    close(run["weights"], truth["weights"])
    answers = {(step, sample): answer for step, sample, answer in truth["answers"]}
    assert all(answers[step, sample] == answer for step, sample, answer in run["answers"])


def exported(folder):
    """The weights of an exported directory, in the dtype that its configuration names."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(info.values())
    return model


def full_context(root):
    """Two prompts: one with room for answers, one that fills the context."""
    path = tiny_run(
        root,
        tied=True,
        model=MODEL | {"max_position_embeddings": 8},
        rollout={"max_prompt_length": 8, "max_response_length": 4},
        data={"shuffle": False},
        training={"max_steps": 2, "train_batch_size": 2, "micro_batch_size_per_gpu": 1},
    )
    rows = [{"prompt": "1+3="}, {"prompt": "123+456="}]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
