"""torch and vocabtp-kernels are all that this package asks for; neither brings numpy."""

import without_numpy

PROGRAM = """
import torch.distributed as dist
import vocabtp.dist as vd

store = dist.FileStore(f"{folder}/store", world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
group = dist.group.WORLD
shard = vd.VocabShard.resolve([7, 4][rank], group).check()
assert vd.VocabShard.even(11, group).global_size == shard.global_size == 11
vd.agree({"rows": 5}, what="test", group=group)
try:
    vd.agree({"rows": rank}, what="test", group=group)
except ValueError as error:
    assert str(error) == "test: rows must be the same on all ranks, got 0 on rank 0, 1 on rank 1"
else:
    raise SystemExit("no error")

torch.manual_seed(0)
dense_p, dense_q = torch.randn(2, 5, 11)
p = dense_p[:, shard.start : shard.end].clone().requires_grad_()
q = dense_q[:, shard.start : shard.end].clone().requires_grad_()
ids = torch.tensor([0, 3, -100, 10, 5])
for place in ({"tp_group": group}, {"shard": shard}):
    chosen, spread = vd.vocab_parallel_logprobs_and_entropy(p, ids, **place)
    values = [
        vd.vocab_parallel_logprobs(p, ids, **place), vd.vocab_parallel_entropy(p, **place),
        chosen, spread, vd.vocab_parallel_kl_div(p, q, True, **place),
        vd.vocab_parallel_jsd(p, q, **place),
    ]
    sum(v.sum() for v in values).backward()
try:
    vd.vocab_parallel_logprobs(p, ids.masked_fill(ids == 10, 10 + rank), group)
except ValueError as error:
    assert "got 11 at position [3] on rank 1" in str(error), error
else:
    raise SystemExit("no error")
assert torch.equal(vd.vocab_parallel_argmax(p, shard), dense_p.argmax(-1))
keys = vd.sampling_keys(0, torch.arange(5))
vd.vocab_parallel_sample(p, shard, keys=keys, top_k=3, top_p=0.9, min_p=0.01)
assert torch.equal(vd.gather_vocab(p.detach(), shard), dense_p)
dist.barrier()
"""


def test_the_ops_need_no_numpy(tmp_path):
    without_numpy.run(PROGRAM, 2, tmp_path)
