"""The same on accelerators: one rank each where there are several, else two ranks share one."""

import pytest
import torch
import torch.distributed as dist

import vocabtp.dist as vd
from vocabtp.dist.testing import check_op, hard_logits, layouts, ops, piece
from vocabtp.kernels import check_ids

pytestmark = pytest.mark.gpu

ROWS, VOCAB = 14, 1031


def _start(rank, world):
    """This rank's device, and a group that can talk about its tensors."""
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type
    torch.accelerator.set_device_index(rank % count)
    backend = dist.get_default_backend_for_device(kind) if count >= world else "gloo"
    return torch.device(kind, rank % count), dist.new_group(list(range(world)), backend=backend)


def _run(rank, world):
    device, group = _start(rank, world)
    values = {}
    ids = torch.randint(VOCAB, (ROWS, 2), generator=torch.Generator().manual_seed(0)).to(device)
    ids[2:6] = torch.tensor([[VOCAB - 1], [VOCAB - 1], [VOCAB - 1], [0]], device=device)
    cuts = layouts(VOCAB, world)
    for cut in ("even", "empty first", "uneven"):
        shard = vd.VocabShard(*cuts[cut][rank], VOCAB, group).check()
        for name, op in ops().items():
            for dtype in (torch.float32, torch.bfloat16):
                logits = [x.to(device, dtype) for x in hard_logits(ROWS, VOCAB)[: op.sides]]
                up = [torch.ones_like(ids, dtype=torch.float32)] if op.takes_ids else []
                if not op.takes_ids or "and_entropy" in name:
                    up.append(torch.linspace(0, 1, ROWS, device=device))
                call = {"shard": shard} if dtype is torch.float32 else {"tp_group": group}
                out = check_op(
                    op, logits, cuts[cut][rank], up, index=ids if op.takes_ids else None, **call
                )
                values[cut, name, dtype] = [x.cpu() for x in out]
        x = hard_logits(ROWS, VOCAB)[0]
        local = piece(x.to(device), cuts[cut][rank])
        keys = vd.sampling_keys(3, torch.arange(ROWS))
        # bitwise the tokens of a CPU that has the whole vocabulary
        assert torch.equal(
            vd.vocab_parallel_argmax(local, shard).cpu(), vd.vocab_parallel_argmax(x)
        )
        for options in (
            {},
            {"temperature": 0.7},
            {"top_k": 9, "top_p": 0.8, "temperature": 1.3},
            {"top_p": 0.9, "min_p": 0.01, "temperature": 1.3},
        ):
            drawn = vd.vocab_parallel_sample(local, shard, keys=keys.to(device), **options)
            assert torch.equal(drawn.cpu(), vd.vocab_parallel_sample(x, keys=keys, **options))
        full = vd.gather_vocab(local, shard).cpu()
        assert torch.equal(full.nan_to_num(7.0), x.nan_to_num(7.0))
    # disagreement and bad ids
    said = []
    x = torch.zeros(3, 5, device=device)
    bad = torch.tensor([0, 5 * world if rank == 1 else 1, 2], device=device)
    for call in (
        lambda: vd.vocab_parallel_entropy(x[: 3 - rank], group),
        lambda: vd.vocab_parallel_logprobs(x, bad, group, validate_ids=True),
    ):
        with pytest.raises(ValueError, match=r"vocab_parallel_entropy|an id must be in") as info:
            call()
        said.append(str(info.value))
    lp = vd.vocab_parallel_logprobs(x, bad, group)
    assert lp.isnan().tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"^vocab_parallel_logprobs: an id must be in") as info:
        check_ids()
    said.append(str(info.value))
    return values, said


def test_ops_and_tokens_on_accelerators(ranks):
    count = torch.accelerator.device_count()
    assert count, "the gpu tests need an accelerator"
    world = max(2, min(4, count))
    (values, said), *others = ranks(_run, world, limit=240)
    for other_values, other_said in others:
        assert other_said == said
        for name, outputs in values.items():
            for a, b in zip(outputs, other_values[name], strict=True):
                assert torch.equal(a.view(torch.int32), b.view(torch.int32)), name
