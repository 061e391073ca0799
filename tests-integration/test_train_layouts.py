"""One configuration at every layout and on every route: the same tokens, the same losses."""

import pytest
import torch

from tiny_run import recorded, tiny_run

UPDATES = 20
TRAINING = {"max_steps": UPDATES, "train_batch_size": 3, "micro_batch_size_per_gpu": 3}


def runs(rank, world, path, variants):
    """Tokens, losses and weights of each variant of the run."""
    out = []
    for name, overrides in variants:
        folder = f"training.save_dir={path.parent / f'{name}-{world}'}"
        run = recorded(path, folder, f"parallel.tp={world}", *overrides)
        out.append({key: run[key] for key in ("answers", "losses", "weights", "metrics")})
    return out


def test_tp_1_2_and_3_take_the_same_20_updates(ranks, tmp_path):
    path = tiny_run(tmp_path, training=TRAINING)
    variants = [
        ("greedy", []),
        ("sampled", ["rollout.temperature=1.0", "rollout.top_p=0.95", "rollout.top_k=20"]),
    ]
    truth = runs(0, 1, path, variants)
    # a run whose answers never change would prove little
    for run in truth:
        assert len({tuple(answer) for _, _, answer in run["answers"]}) > 10
        assert run["losses"][-1] < run["losses"][0]
    for world in (2, 3):
        for peer in ranks(runs, world, path, variants, limit=120):
            for mine, theirs in zip(peer, truth, strict=True):
                assert mine["answers"] == theirs["answers"]
                assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
                for name, weight in theirs["weights"].items():
                    torch.testing.assert_close(mine["weights"][name], weight, rtol=1e-3, atol=1e-5)


def test_three_routes_train_alike(ranks, tmp_path):
    path = tiny_run(
        tmp_path,
        tied=True,
        kind="qwen3",
        training=TRAINING | {"max_steps": 3},
        distillation={"loss_type": "jsd", "beta": 0.3, "temperature": 1.5, "chunk_size": 4},
    )
    routes = ("vocab_parallel", "gathered", "dense")
    variants = [(route, [f"distillation.loss_backend={route}"]) for route in routes]
    for peer in ranks(runs, 2, path, variants):
        for other in peer[1:]:
            assert other["answers"] == peer[0]["answers"]
            assert other["losses"] == pytest.approx(peer[0]["losses"], rel=1e-5)
            for name, weight in peer[0]["weights"].items():
                torch.testing.assert_close(other["weights"][name], weight, rtol=1e-4, atol=1e-6)
            for a, b in zip(other["metrics"], peer[0]["metrics"], strict=True):
                for key in ("reverse_kl", "forward_kl", "student_entropy", "top1_agreement"):
                    assert a[key] == pytest.approx(b[key], rel=1e-4)
