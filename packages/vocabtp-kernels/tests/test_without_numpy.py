"""torch is all that this package asks for, and torch does not bring numpy."""

import without_numpy

PROGRAM = """
import vocabtp.kernels as vk
from vocabtp.kernels import reference
from vocabtp.kernels.testing import run_sharded

p = torch.randn(5, 11, requires_grad=True)
q = torch.randn(5, 11, requires_grad=True)
ids = torch.tensor([0, 3, -100, 10, 5])
chosen, spread = vk.logprobs_and_entropy(p, ids)
values = [
    vk.logprobs(p, ids), vk.entropy(p), chosen, spread, vk.kl_div(p, q, reverse=True),
    vk.kl_div(p, q, pointwise_clip=0.5), vk.jsd(p, q), vk.jsd(p, q, beta=0.1, rescale=True),
]
sum(v.sum() for v in values).backward()
assert p.grad.isfinite().all() and q.grad.isfinite().all()
try:
    vk.logprobs(p, ids + 1)
except ValueError as error:
    assert "an id must be in [0, 11)" in str(error)
else:
    raise SystemExit("no error")
p, q = p.detach(), q.detach()
whole = vk.jsd(p, q)
parts = run_sharded(
    lambda x, start, end: vk.jsd(p[:, start:end], q[:, start:end], exchange=x), [(0, 4), (4, 11)]
)
assert torch.allclose(parts[0], whole, atol=1e-6) and torch.equal(*parts)
assert torch.allclose(reference.jsd(p, q).float(), whole, atol=1e-6)
"""


def test_the_ops_need_no_numpy(tmp_path):
    without_numpy.run(PROGRAM, 1, tmp_path)
