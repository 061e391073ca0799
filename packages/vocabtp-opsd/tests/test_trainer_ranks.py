import json

import pytest
import torch

from faulty_ranks import full_disk
from tiny_run import recorded, same, tiny_run

SGD = {
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler": "constant",
    "max_grad_norm": 0,
    "train_batch_size": 2,
    "micro_batch_size_per_gpu": 1,
}


def close(a, b):
    for name, value in b.items():
        torch.testing.assert_close(a[name], value, rtol=1e-5, atol=1e-6)


def runs(rank, world, calls):
    """`recorded` of each call, without what is not the same on every rank."""
    out = []
    for path, overrides in calls:
        found = recorded(path, *overrides)
        out.append({k: v for k, v in found.items() if k not in ("rollouts", "result")})
        out[-1]["summary"] = found["result"].summary
    return out


def full_context(root, **sections):
    """Two prompts: one with room for three tokens, one that fills the context."""
    path = tiny_run(
        root,
        model={"max_position_embeddings": 8},
        rollout={"max_prompt_length": 8, "max_response_length": 4},
        data={"shuffle": False},
        **sections,
    )
    rows = [{"prompt": "1+3="}, {"prompt": "123+456="}]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_copy_without_response_tokens_takes_part(ranks, tmp_path):
    """B37 at DP=2 and at TP=2 x DP=2; the oracle sees the other copy's tokens alone."""
    path = full_context(tmp_path / "both", training=SGD | {"max_steps": 2})
    alone = full_context(tmp_path / "one", training=SGD | {"max_steps": 2, "train_batch_size": 1})
    (tmp_path / "one" / "train.jsonl").write_text(json.dumps({"prompt": "1+3="}) + "\n")
    truth = recorded(alone)
    assert truth["metrics"][0]["response_tokens"] == 4
    for world, tp in ((2, 1), (4, 2)):
        save = f"training.save_dir={tmp_path / str(world)}"
        for [run] in ranks(runs, world, [(path, (f"parallel.tp={tp}", save))]):
            assert run["applied"] == [True, True]
            assert run["losses"] == pytest.approx(truth["losses"], rel=1e-6)
            close(run["weights"], truth["weights"])
            for step in run["metrics"]:
                assert step["response_tokens"] == 4
                assert step["empty_responses"] == 1
                assert all(v == v for v in step.values() if isinstance(v, float))


def test_copies_train_as_one_process_does_and_resume_exactly(ranks, tmp_path):
    """TP=2 x DP=2 against a single process; then from the checkpoint in its middle, bit for bit."""
    path = tiny_run(
        tmp_path,
        held_out=5,
        rollout={"temperature": 1.0, "n_samples_per_prompt": 2},
        # the last window is short: 10 prompts in batches of 4, of which copies take 4, 4 and 2
        prompts=10,
        training={
            "max_steps": -1,
            "save_steps": 2,
            "warmup_steps": 1,
            "weight_decay": 0.1,
            "micro_batch_size_per_gpu": 2,
        },
    )
    truth = recorded(path, f"training.save_dir={tmp_path / 'single'}")
    save = (f"training.save_dir={tmp_path / 'out'}", "parallel.tp=2")
    straight = ranks(runs, 4, [(path, save)])
    for rank, [run] in enumerate(straight):
        assert run["losses"] == pytest.approx(truth["losses"], rel=2e-5)
        close(run["weights"], truth["weights"])
        answers = {(s, i): a for s, i, a in truth["answers"]}
        # each copy answers its own prompts, tensor-parallel peers the same ones
        assert all(answers[s, i] == a for s, i, a in run["answers"])
        assert run["answers"] == straight[rank - rank % 2][0]["answers"]
        assert run["summary"].exact_match == truth["result"].summary.exact_match
        assert run["summary"].reverse_kl == pytest.approx(
            truth["result"].summary.reverse_kl, rel=1e-5
        )
        assert same(run["weights"], straight[0][0]["weights"])
    everything = [answer for run in straight[::2] for answer in run[0]["answers"]]
    assert sorted(everything) == sorted(truth["answers"])
    last = tmp_path / "out" / "checkpoints" / "step-00000003"
    # as if the writer of the last one had been killed
    last.rename(last.with_name(last.name + ".partial"))
    for rank, [run] in enumerate(ranks(runs, 4, [(path, save)])):
        before = straight[rank][0]
        assert run["losses"] == before["losses"][2:]
        assert same(run["weights"], before["weights"])
        assert same(run["optimizer"], before["optimizer"])
    # another layout reads the same checkpoint: rounding apart, the same third step
    last.rename(last.with_name(last.name + ".partial"))
    other = recorded(path, save[0])
    assert other["losses"] == pytest.approx(truth["losses"][2:], rel=2e-5)
    close(other["weights"], truth["weights"])


def noisy(rank, world, path):
    import logging

    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("vocabtp.opsd").addHandler(handler)
    run = recorded(path, "parallel.tp=2")
    return run["losses"], run["weights"], [line for line in told if "dropout" in line]


def test_dropout_of_what_all_ranks_hold_is_that_of_one_process(ranks, tmp_path):
    """Of embeddings and of what layers add; ranks that drew apart would compute apart."""
    rates = {"embedding_dropout": 0.2, "residual_dropout": 0.2}
    path = tiny_run(tmp_path, kind="starcoder2", model=rates)
    quiet = recorded(tiny_run(tmp_path / "quiet", kind="starcoder2"))
    truth = recorded(path, f"training.save_dir={tmp_path / 'single'}")
    assert abs(truth["losses"][0] - quiet["losses"][0]) > 0.01
    for losses, weights, told in ranks(noisy, 2, path):
        assert losses == pytest.approx(truth["losses"], rel=1e-5)
        close(weights, truth["weights"])
        assert not told


def test_attention_dropout_of_cut_heads_is_told_of(ranks, tmp_path):
    """Its noise is not that of one process; the ranks go on alike all the same."""
    path = tiny_run(tmp_path, model={"attention_dropout": 0.3})
    (losses, weights, told), (others, other_weights, untold) = ranks(noisy, 2, path)
    assert losses == others
    assert same(weights, other_weights)
    [line] = told
    assert "attention_dropout 0.3, heads of different tensor-parallel ranks get the same" in line
    assert not untold


def finishes(rank, world, path):
    return recorded(path, "parallel.tp=2")["losses"]


def exports(rank, world, path, target):
    from vocabtp.opsd.config import load_config
    from vocabtp.opsd.trainer import Trainer

    checked = [Trainer(load_config(path, ["parallel.tp=2"])).check()]
    run = recorded(path, "parallel.tp=2")
    trainer = Trainer(load_config(path, ["parallel.tp=2"]))
    checked.append(trainer.check())
    evaluation = trainer.evaluate()
    trainer.export(target)
    answers = trainer.rollout(target / "answers.jsonl")
    refused = None
    try:
        trainer.export(target)
    except ValueError as error:
        refused = str(error)
    return run["weights"], evaluation, answers, checked, refused


@pytest.mark.parametrize("tied", [False, True])
def test_export_is_a_plain_directory_with_the_trained_weights(ranks, tmp_path, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny_run(tmp_path, tied=tied, held_out=4)
    target = tmp_path / "exported"
    results = ranks(exports, 2, path, target)
    weights, evaluation, answers, checked, _ = results[0]
    facts = {"prompts": 12, "held_out_prompts": 4, "steps": 3, "tp": 2, "dp": 1}
    assert all(facts.items() <= found.items() for found in checked)
    assert [found["resume"] for found in checked] == [
        None,
        str(tmp_path / "out" / "checkpoints" / "step-00000003"),
    ]
    # whole parameters, not this rank's part of them
    assert checked[0]["student_parameters"] == sum(w.numel() for w in weights.values())
    model, info = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert same(dict(model.named_parameters()), weights)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert AutoTokenizer.from_pretrained(target).encode("1+2=")[:1] != []
    rows = [json.loads(line) for line in (target / "answers.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == list(range(1, answers + 1)) == list(range(1, 13))
    for row in rows[:4]:
        ids = AutoTokenizer.from_pretrained(target)(row["prompt"], return_tensors="pt")
        whole = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        text = AutoTokenizer.from_pretrained(target).decode(
            whole[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert row["response"] == text
    logged = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert evaluation["reverse_kl"] == pytest.approx(logged[-1]["reverse_kl"], rel=1e-6)
    assert all("not empty" in result[-1] for result in results)


@pytest.mark.parametrize("what", ["tensors", "mark"])
def test_a_full_disk_leaves_the_checkpoint_before_and_all_ranks_say_so(ranks, tmp_path, what):
    path = tiny_run(tmp_path, training={"max_steps": 2, "save_steps": 1})
    root = tmp_path / "out" / "checkpoints"
    for kind, said in ranks(full_disk, 2, path, what, ("parallel.tp=2",)):
        assert kind == "CheckpointError"
        assert "No space left on device" in said
        assert said.endswith("step-00000001 is still the newest")
        assert what == "mark" or "rank 1" in said
    # what was half written gives its room back
    assert [p.name for p in root.iterdir()] == ["step-00000001"]
    assert [len(losses) for losses in ranks(finishes, 2, path)] == [1, 1]


def test_metrics_on_a_full_disk_end_the_run_on_all_ranks(ranks, tmp_path):
    path = tiny_run(tmp_path, training={"max_steps": 5, "save_steps": 1})
    first, second = ranks(full_disk, 2, path, "metrics", ("parallel.tp=2",))
    assert first == ("UserError", "training.save_dir: [Errno 28] No space left on device")
    assert second == ("UserError", "training.save_dir: rank 0 cannot write there")


def interrupted(rank, world, path):
    """Rank 1 alone is told to stop: in its second step, and later while evaluating."""
    import os
    import signal

    import vocabtp.opsd.run as run_module
    from vocabtp.opsd.config import load_config
    from vocabtp.opsd.errors import Interrupted
    from vocabtp.opsd.trainer import Trainer

    said = []
    generate, evaluate = run_module.Stepper.run, run_module.evaluate

    def step(self, index, *stopping):
        if rank == 1 and index == 1 and not said:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(self, index, *stopping)

    def evaluating(*args, tick, **options):
        if rank == 1 and said:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*args, tick=tick, **options)

    run_module.Stepper.run, run_module.evaluate = step, evaluating
    for _ in range(2):
        try:
            Trainer(load_config(path, [])).train()
            said.append(None)
        except Interrupted as error:
            said.append(error.signum)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return said


def test_all_ranks_stop_when_one_is_told_to(ranks, tmp_path):
    path = tiny_run(tmp_path, held_out=2, training={"train_batch_size": 2, "max_steps": 3})
    assert ranks(interrupted, 2, path) == [[15, 2], [15, 2]]
    names = sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir())
    # the second step was under way, and is taken again
    assert names == ["step-00000001", "step-00000003"]
    rows = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["kind"]) for row in rows] == [
        (0, "eval"), (1, "train"), (2, "train"), (3, "train"),
    ]  # fmt: skip
