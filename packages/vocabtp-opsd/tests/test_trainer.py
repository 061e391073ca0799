"""Training on one or several ranks: the updates are the dense ones, and every step is counted."""

import json

import pytest
import torch

from tiny_run import logged, recorded, same, tiny_run


def dense_updates(root, run, *, tied, rate, steps):
    """The same updates by whole models and plain autograd, on the tokens that the run sampled."""
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(root / role, dtype=torch.float32).double()
        for role in ("student", "teacher")
    )
    assert (student.lm_head.weight is student.model.embed_tokens.weight) == tied
    losses = []
    for step in range(steps):
        total, tokens = 0.0, 0
        for _, _, rollout in [r for r in run["rollouts"] if r[0] == step]:
            mask = rollout.attention_mask
            inputs = {
                "input_ids": rollout.tokens,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
            }
            rows = rollout.response_mask[:, 1:]
            p = student(**inputs).logits[:, :-1][rows].log_softmax(-1)
            with torch.no_grad():
                q = teacher(**inputs).logits[:, :-1][rows].log_softmax(-1)
            total = total + (p.exp() * (p - q)).sum()
            tokens += int(rows.sum())
        loss = total / tokens
        grads = torch.autograd.grad(loss, list(student.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(student.parameters(), grads, strict=True):
                parameter -= rate * grad
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in student.named_parameters()}


SGD = {
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler": "constant",
    "max_grad_norm": 0,
    "micro_batch_size_per_gpu": 2,
}
FOUR_HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "intermediate_size": 32,
}


def run_both(rank, world, roots):
    return [recorded(root / "opsd.yaml", f"parallel.tp={world}") for root in roots]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_three_sgd_updates_are_the_dense_ones(ranks, tmp_path, world):
    roots = [tmp_path / "untied", tmp_path / "tied"]
    for root in roots:
        tiny_run(root, tied=root.name == "tied", model=FOUR_HEADS, training=SGD)
    results = [run_both(0, 1, roots)] if world == 1 else ranks(run_both, world, roots)
    for root, run in zip(roots, results[0], strict=True):
        tied = root.name == "tied"
        losses, truth = dense_updates(root, run, tied=tied, rate=0.05, steps=3)
        assert run["losses"] == pytest.approx(losses, rel=1e-5)
        assert run["tied"] == tied
        # a tied weight is one parameter with one optimizer entry
        assert run["parameters"] == len(run["weights"]) == len(truth)
        for name, weight in truth.items():
            torch.testing.assert_close(run["weights"][name].double(), weight, rtol=1e-4, atol=1e-6)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a["answers"] == b["answers"]
            assert same(a["weights"], b["weights"])


def test_training_happens_and_the_teacher_stays(tmp_path):
    training = {"eval_steps": 2, "logging_steps": 2}
    path = tiny_run(tmp_path, held_out=3, model={"attention_dropout": 0.1}, training=training)
    run = recorded(path, report=True)
    assert run["applied"] == [True] * 3
    # every applied step moves every weight (k biases have no gradient by symmetry of softmax)
    for changed in run["changed"]:
        assert all(moved for name, moved in changed.items() if "k_proj.bias" not in name)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    assert same(run["teacher"], dict(loaded.named_parameters()))
    summary = run["result"].summary
    assert summary.reverse_kl[1] < summary.reverse_kl[0]
    assert (summary.steps, summary.skipped_steps) == (3, 0)
    out = tmp_path / "out"
    rows = logged(out)
    assert [(row["step"], row["kind"]) for row in rows] == [
        (0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (3, "eval"),
    ]  # fmt: skip
    for row in [row for row in rows if row["kind"] == "train"]:
        # with the default loss, the loss is the reverse KL of the same rows
        assert row["loss"] == pytest.approx(row["reverse_kl"], rel=1e-5)
        for name in ("forward_kl", "student_entropy", "teacher_entropy", "grad_norm"):
            assert row[name] > 0
        assert 0 <= row["top1_agreement"] <= 1
        assert 0 < row["response_length"] <= row["response_length_max"] <= 6
        assert (row["applied"], row["skipped_steps"]) == (True, 0)
    whole_row = json.loads((out / "metrics.jsonl").read_text().splitlines()[1])
    phases = [whole_row[f"seconds_{p}"] for p in ("rollout", "teacher", "student", "step", "other")]
    assert sum(phases) == pytest.approx(whole_row["seconds"], rel=1e-3)
    assert whole_row["peak_memory"][0] > 2**20
    for name in ("config.yaml", "report.html"):
        assert (out / name).stat().st_size > 100


def test_a_last_short_batch_is_applied_by_its_own_tokens(tmp_path):
    """D5, and D3: 5 prompts in batches of 4."""
    data = {"shuffle": False}
    training = {"max_steps": -1, "num_train_epochs": 1, "micro_batch_size_per_gpu": 1} | SGD
    run = recorded(tiny_run(tmp_path, prompts=5, data=data, training=training))
    assert run["applied"] == [True, True]
    assert [m["response_tokens"] for m in run["metrics"]] == [
        sum(len(a) for s, _, a in run["answers"] if s == i) for i in range(2)
    ]
    losses, truth = dense_updates(tmp_path, run, tied=False, rate=0.05, steps=2)
    assert run["losses"] == pytest.approx(losses, rel=1e-5)
    for name, weight in truth.items():
        torch.testing.assert_close(run["weights"][name].double(), weight, rtol=1e-4, atol=1e-6)


def test_steps_without_a_response_are_skipped_and_counted(tmp_path, capsys):
    """D4: prompts that fill the context; weight decay must not move anything either."""
    path = tiny_run(
        tmp_path,
        model={"max_position_embeddings": 5},
        rollout={"max_prompt_length": 5, "max_response_length": 4},
        training={"weight_decay": 0.5, "train_batch_size": 1, "max_steps": 2},
        data={"shuffle": False},
    )
    rows = [{"prompt": "12+4="}, {"prompt": "1+2="}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = recorded(path)
    assert run["applied"] == [False, True]
    assert not any(run["changed"][0].values())
    assert any(run["changed"][1].values())
    assert [m["skipped_steps"] for m in run["metrics"]] == [1, 1]
    assert run["metrics"][0]["empty_responses"] == 1
    assert run["result"].summary.skipped_steps == 1
    said = capsys.readouterr().out
    assert "step 1 skipped: no response token" in said
    assert "1 sample(s) without a response" in said
