"""The loss over several ranks: each route gives the dense one, and no rank fails alone."""

import pytest
import torch
import torch.distributed as dist

from dense_loss import CASES, dense, logits, scale_of, value_options
from vocabtp.cache import TeacherLogitCache
from vocabtp.dist import VocabShard
from vocabtp.opsd.loss import distill_loss, row_metrics

ROUTES = ("vocab_parallel", "gathered", "dense")


def routes(rank, world, vocab):
    """Loss, gathered gradient and metrics of each route and case; the dense truth on one rank."""
    group = dist.group.WORLD
    shard = VocabShard.even(vocab, group)
    s, t = logits(17, vocab), logits(17, vocab, seed=1)
    mine = slice(shard.start, shard.end)
    out = []
    for options in CASES:
        found = {}
        for route in ROUTES:
            whole = route == "dense"
            local = (s if whole else s[:, mine]).clone().requires_grad_()
            teacher = t if whole else t[:, mine]
            cut = VocabShard(0, vocab, vocab) if whole else shard
            cache = TeacherLogitCache.store(teacher, shard=cut, dtype=torch.float32)
            rows = []
            loss = distill_loss(
                local, cache, None, None, cut, loss_backend=route, chunk_size=6, collect=rows,
                **options,
            )  # fmt: skip
            loss.backward()
            grad = torch.zeros(17, vocab)
            grad[:, slice(None) if whole else mine] = local.grad / (world if whole else 1)
            dist.all_reduce(grad)
            found[route] = (loss.detach(), grad, torch.cat(rows, 1))
        out.append(found)
    refused = None
    try:
        # one rank alone holds other rows: every rank must raise, and soon
        rows = 17 - (rank == 1)
        distill_loss(s[:rows, mine], t[:rows, mine], shard=shard)
    except ValueError as error:
        refused = str(error)
    return out, refused


@pytest.mark.parametrize(("world", "vocab"), [(2, 37), (4, 37), (4, 9)])
def test_three_routes_agree_at_every_tp(ranks, world, vocab):
    results = ranks(routes, world, vocab)
    s, t = logits(17, vocab), logits(17, vocab, seed=1)
    for i, options in enumerate(CASES):
        truth_input = s.double().requires_grad_()
        truth = dense(truth_input, t, **value_options(options)).mean() * scale_of(options)
        truth.backward()
        for rank, (found, refused) in enumerate(results):
            assert "rows must be the same" in refused, rank
            for route in ROUTES:
                loss, grad, rows = found[i][route]
                torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(grad.double(), truth_input.grad, rtol=1e-4, atol=1e-7)
                # every rank has bitwise the same loss
                assert torch.equal(loss, results[0][0][i][route][0])
                torch.testing.assert_close(rows, row_metrics(s, t), rtol=1e-4, atol=1e-5)


WRONG = {
    "student": ({"student_logits": [[1.0]]}, "student_logits must be Tensor, got list"),
    "student of ints": ({"student_logits": torch.zeros(4, 3).int()}, "must be floating-point"),
    "teacher": ({"teacher": [[1.0]]}, "teacher must be Tensor or TeacherCache, got list"),
    "mask": ({"response_mask": [1]}, "response_mask must be Tensor or None, got list"),
    "config": ({"config": {"beta": 1}}, "config must be the distillation section or None"),
    "normalizer": ({"normalizer": "x"}, "normalizer must be Tensor or int or float or None"),
    "normalizer 0": ({"normalizer": 0}, "normalizer must be a finite number > 0, got 0"),
    "chunk": ({"chunk_size": 1.5}, "chunk_size must be an int, got 1.5"),
    "dtype": ({"student_logits": torch.zeros(4, 3).half()}, "dtype must be the same on all ranks"),
}


def wrong_on_one(rank, world):
    shard = VocabShard(3 * rank, 3 * rank + 3, 3 * world, dist.group.WORLD)
    out = []
    for wrong, _ in WRONG.values():
        good = {"student_logits": torch.zeros(4, 3), "teacher": torch.zeros(4, 3), "shard": shard}
        try:
            distill_loss(**good | (wrong if rank == 1 else {}))
            out.append("")
        except ValueError as error:
            out.append(str(error))
    return out


def test_what_one_rank_has_wrong_is_an_error_on_all(ranks):
    first, second = ranks(wrong_on_one, 2)
    assert first == second
    for message, (_, text) in zip(first, WRONG.values(), strict=True):
        assert message.startswith("distill_loss: ")
        assert text in message
    with pytest.raises(TypeError, match="shard must be VocabShard or None, got tuple"):
        distill_loss(torch.zeros(4, 3), torch.zeros(4, 3), shard=(0, 3))
