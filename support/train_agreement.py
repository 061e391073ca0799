"""Small runs of the trainer, and when one of them took the steps of another."""

import json

import pytest
import torch

from tiny_run import tiny_run

# two layers; 37 ids and 15 units of 30 cut unevenly; answers of 1 to 6 tokens also without sampling
MODEL = {"num_hidden_layers": 2, "eos_token_id": [2, 3, 4, 5, 6, 7, 8, 9]}
CLIP = 0.05
# steps of 4, 4 and 1 prompts: in the last one a copy has a micro-batch less than the other
PROMPTS, STEPS = 9, 3
TRAINING = {"max_steps": -1, "micro_batch_size_per_gpu": 1, "max_grad_norm": CLIP}


def small_run(root, **sections):
    """A greedy run whose answers differ and end at different lengths: see `varied`.

    In the float32 runs of the tests the two largest logits of every token are at least 1.8e-3 of
    the larger one apart, about a hundred times what runs may differ by.
    """
    training = TRAINING | {"weight_decay": 0.1} | sections.pop("training", {})
    rollout = {"temperature": 0.0, "max_response_length": 6} | sections.pop("rollout", {})
    path = tiny_run(
        root,
        **{"tied": True, "held_out": 3, "prompts": PROMPTS, "model": MODEL} | sections,
        rollout=rollout,
        training=training,
    )
    file = root / "train.jsonl"
    # backwards: with one last token for all prompts a tied model would give one answer to all
    rows = [{"prompt": json.loads(line)["prompt"][::-1]} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fixed_pick(self, logits, position):
    """Instead of the rollout's `_Picker.pick`: tokens that no rounding of weights can change.

    Answers of 1 to 6 tokens, by sample and step.
    """
    _, step, ids = self._noise
    tokens = 3 + (7 * ids + 5 * position + 11 * step) % 30
    return torch.where((ids + step) % 5 + 1 == position, 2, tokens)


def varied(run):
    """Whether agreement with this run proves something; `run` again."""
    answers = [tuple(answer) for _, _, answer in run["answers"]]
    assert len(answers) == PROMPTS
    assert len(set(answers)) > PROMPTS // 2
    assert len(set(map(len, answers))) > 1
    assert all(loss > 0.1 for loss in run["losses"])
    assert all(any(changed.values()) for changed in run["changed"])
    return run


def close(mine, theirs, rtol=1e-5, atol=1e-6):
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=rtol, atol=atol)


def same(mine, theirs):
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def agrees(run, truth, tolerance=2e-5, rtol=1e-5, atol=1e-6):
    """The steps of one dense float32 process, with the same answers.

    Losses and gradient norms to 2e-5 of theirs, weights to 1e-5 and an absolute 1e-6, unless told
    otherwise.
    """
    assert run["losses"] == pytest.approx(truth["losses"], rel=tolerance)
    for mine, theirs in zip(run["metrics"], truth["metrics"], strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
        assert mine["response_tokens"] == theirs["response_tokens"]
    close(run["weights"], truth["weights"], rtol, atol)
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
