"""A DeepSpeed program changes one import and computes the same; names and arguments fit."""

import inspect
import logging
import os
import types
from pathlib import Path

import torch

PROGRAM = Path(__file__).parent / "programs" / "deepspeed_step.py"
THEIRS, OURS = "from deepspeed.sequence.vocab_parallel_ops import", "from vocabtp.dist import"
OPS = ("vocab_parallel_logprobs", "vocab_parallel_entropy", "vocab_parallel_kl_div")


def quiet_deepspeed():
    """DeepSpeed on CPU ranks that have a group already."""
    # what a launcher sets
    os.environ |= {"LOCAL_RANK": str(torch.distributed.get_rank()), "DS_ACCELERATOR": "cpu"}
    import deepspeed

    deepspeed.logger.setLevel(logging.ERROR)
    # its collectives in shared memory are compiled first, for a minute; gloo does without
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)


def program(text):
    module = types.ModuleType("program")
    exec(compile(text, str(PROGRAM), "exec"), module.__dict__)
    return module


def both(rank, world, steps):
    quiet_deepspeed()
    before = PROGRAM.read_text()
    assert before.count(THEIRS) == 1
    out = []
    for text in (before, before.replace(THEIRS, OURS)):
        module = program(text)
        out.append((module.vocab_parallel_entropy.__module__, *module.train(steps)))
    return out


def test_one_changed_import_gives_the_same_updates(ranks):
    for theirs, ours in ranks(both, 2, 3, limit=90):
        assert theirs[0] == "deepspeed.sequence.vocab_parallel_ops"
        assert ours[0] == "vocabtp.dist.ops"
        losses = [float(step[0]) for step in theirs[1]]
        assert losses[2] < losses[1] < losses[0]
        for mine, other in zip(ours[1], theirs[1], strict=True):
            for value, truth in zip(mine, other, strict=True):
                assert value.dtype == truth.dtype
                assert value.shape == truth.shape
                torch.testing.assert_close(value, truth, rtol=2e-5, atol=2e-6)
            assert mine[-1].abs().max() > 1e-3
        assert ours[2].keys() == theirs[2].keys()
        for name, weight in theirs[2].items():
            torch.testing.assert_close(ours[2][name], weight, rtol=1e-5, atol=2e-6)


def edges(rank, world):
    """Values and gradients of both sides on the rows where implementations differ most."""
    quiet_deepspeed()
    from deepspeed.sequence import vocab_parallel_ops as theirs

    import vocabtp.dist as ours

    group = torch.distributed.group.WORLD
    draw = torch.Generator().manual_seed(5)
    student, teacher = (torch.randn(2, 6, 22, generator=draw) * 4 for _ in range(2))
    student[0, 0] += 1000.0
    masked = torch.arange(22) % 5 == 0
    for side in (student, teacher):
        side[0, 1, masked] = -torch.inf
    student[0, 2] = -torch.inf
    teacher[0, 3, masked] = -torch.inf  # reverse KL is infinite there
    cut = slice(0, 15) if rank == 0 else slice(15, 22)
    bounds = (cut.start, cut.stop)
    index = torch.randint(22, (2, 6), generator=draw)
    index[1, :2] = -100
    upstream = torch.randn(2, 6, generator=draw)
    upstream[0, 2:4] = 0.0

    def of(dtype, ops):
        out = []
        for call in (
            lambda a, b: ops.vocab_parallel_logprobs(a, index, group, *bounds),
            lambda a, b: ops.vocab_parallel_logprobs(a, index, group, *bounds, 22, -100),
            lambda a, b: ops.vocab_parallel_entropy(a, group),
            lambda a, b: ops.vocab_parallel_kl_div(a, b, False, group),
            lambda a, b: ops.vocab_parallel_kl_div(a, b, reverse=True, tp_group=group),
        ):
            a, b = (s[..., cut].to(dtype).clone().requires_grad_() for s in (student, teacher))
            value = call(a, b)
            # rows that are undefined are masked, as programs do
            kept = torch.where(torch.isfinite(value), value, 0.0)
            (kept * upstream).sum().backward()
            out.append((value.detach(), a.grad, b.grad))
        return out

    dtypes = (torch.float32, torch.bfloat16)
    return [list(zip(of(d, theirs), of(d, ours), strict=True)) for d in dtypes]


def test_the_ops_agree_on_uneven_shards_and_masked_rows(ranks):
    limits = ((torch.float32, 1e-5, 5e-6), (torch.bfloat16, 1e-2, 1e-3))
    for peer in ranks(edges, 2):
        for pairs, (dtype, rtol, atol) in zip(peer, limits, strict=True):
            for theirs, ours in pairs:
                assert ours[0].dtype == theirs[0].dtype == torch.float32
                torch.testing.assert_close(ours[0], theirs[0], rtol=2e-5, atol=2e-4, equal_nan=True)
                for mine, other in zip(ours[1:], theirs[1:], strict=True):
                    if other is None:
                        assert mine is None
                        continue
                    assert mine.dtype == dtype
                    # 0 of an infinite KL is 0 here, and there 0 x inf
                    assert mine.isfinite().all()
                    known = other.isfinite()
                    assert known[:, :3].all()
                    mine, other = mine[known], other[known]
                    torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)


def arguments(rank, world):
    """Their public functions, with names, order and defaults of their arguments."""
    quiet_deepspeed()
    from deepspeed.sequence import vocab_parallel_ops as theirs

    return {
        name: [(p.name, p.default) for p in inspect.signature(op).parameters.values()]
        for name, op in vars(theirs).items()
        if inspect.isfunction(op) and op.__module__ == theirs.__name__ and name[0] != "_"
    }


def test_every_argument_of_theirs_is_one_of_ours(ranks):
    import vocabtp.dist as ours

    (theirs,) = ranks(arguments, 1)
    # a later DeepSpeed may have more
    assert set(OPS) <= set(theirs)
    for name, parameters in theirs.items():
        own = inspect.signature(getattr(ours, name)).parameters.values()
        places = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        given = [(p.name, None if p.default is p.empty else p.default) for p in places]
        expected = [(n, None if d is inspect.Parameter.empty else d) for n, d in parameters]
        assert given[: len(expected)] == expected
