"""Runs whose teacher waits on the host as logits, as hidden states, or in files of another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_run import recorded, tiny_run
from vocabtp.cache import TeacherCache, TeacherLogitCache
from vocabtp.opsd.teacher import Teacher

# rows of a chunk: several to a micro-batch, the last one shorter
SECTIONS = {
    "distillation": {"chunk_size": 5},
    "rollout": {"temperature": 1.0},
    "training": {"micro_batch_size_per_gpu": 2, "eval_steps": 3},
}
# the soft cap of Gemma 2's attention is not in sdpa
ATTENTION = {"qwen2": "sdpa", "gemma2": "eager"}


def both_payloads(rank, world, path, tp, shard):
    out = []
    for payload in ("logits", "hidden"):
        kinds = []
        fetch = TeacherCache.fetch

        def seen(cache, *args, kinds=kinds, fetch=fetch, **options):
            kinds.append(cache.payload)
            return fetch(cache, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TeacherCache, "fetch", seen)
            run = recorded(
                path,
                f"teacher.payload={payload}",
                f"parallel.tp={tp}",
                f"parallel.shard={shard}",
                f"training.save_dir={Path(path).parent / payload}",
            )
        assert set(kinds) == {payload}
        out.append({key: run[key] for key in ("losses", "answers", "metrics", "weights")})
    return out


def same_run(logits, hidden, *, rel):
    """Equal tokens, and losses within `rel`."""
    assert hidden["answers"] == logits["answers"]
    assert hidden["losses"] == pytest.approx(logits["losses"], rel=rel)
    for name in ("reverse_kl", "forward_kl", "teacher_entropy", "grad_norm"):
        a, b = ([row[name] for row in run["metrics"]] for run in (logits, hidden))
        assert a == pytest.approx(b, rel=rel)


@pytest.mark.parametrize(
    ("kind", "world", "tp", "shard"),
    [
        ("qwen2", 1, 1, "none"),
        # test_teacher.py has its scores
        pytest.param("gemma2", 2, 2, "none", marks=pytest.mark.full),
        ("qwen2", 2, 1, "zero3"),
    ],
)
def test_losses_of_both_payloads_are_equal(ranks, tmp_path, kind, world, tp, shard):
    """fp32: what differs is the order in which the head's products are summed."""
    sections = SECTIONS | {"training": SECTIONS["training"] | {"attention": ATTENTION[kind]}}
    path = tiny_run(tmp_path, kind=kind, held_out=2, **sections)
    args = (str(path), tp, shard)
    found = [both_payloads(0, 1, *args)] if world == 1 else ranks(both_payloads, world, *args)
    for logits, hidden in found:
        same_run(logits, hidden, rel=1e-5)


def test_losses_of_both_payloads_are_equal_in_bf16(tmp_path):
    """A teacher in bf16: its hidden states are exact, its logits a unit in the last place apart."""
    path = tiny_run(tmp_path, held_out=2, **SECTIONS)
    found = [
        recorded(
            path,
            "teacher.dtype=bfloat16",
            f"teacher.payload={payload}",
            f"training.save_dir={tmp_path / payload}",
        )
        for payload in ("logits", "hidden")
    ]
    same_run(*found, rel=2e-3)


@pytest.mark.parametrize("payload", ["logits", "hidden"])
def test_a_run_from_saved_caches_gives_the_losses_of_the_run_that_saved_them(
    monkeypatch, tmp_path, payload
):
    path = tiny_run(tmp_path, **{**SECTIONS, "training": {"micro_batch_size_per_gpu": 2}})
    plain = Teacher.score
    saved, opened = [], []

    def save(teacher, rollout, prompts=None):
        cache = plain(teacher, rollout, prompts)
        cache.save(tmp_path / "caches", entry=len(saved))
        saved.append(cache.shape)
        return cache

    def read(teacher, rollout, prompts=None):
        told = teacher.identity(teacher._batch(rollout, prompts))
        folder, shard = tmp_path / "caches", teacher.model.shard
        others = told | {"tokens": told["tokens"] + 1}
        with pytest.raises(ValueError, match="tokens"):
            TeacherLogitCache.open(folder, shard, entry=len(opened), **others)
        cache = TeacherLogitCache.open(folder, shard, entry=len(opened), **told)
        opened.append(cache.shape)
        return cache

    monkeypatch.setattr(Teacher, "score", save)
    options = (f"teacher.payload={payload}", f"training.save_dir={tmp_path}")
    first = recorded(path, options[0], options[1] + "/first")
    monkeypatch.setattr(Teacher, "score", read)
    second = recorded(path, options[0], options[1] + "/second")
    assert len(saved) == 6
    assert opened == saved
    assert second["answers"] == first["answers"]
    if payload == "logits":
        # the same bits, and so all that comes of them
        assert second["losses"] == first["losses"]
        assert all(second["weights"][k].equal(v) for k, v in first["weights"].items())
    else:
        assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)
