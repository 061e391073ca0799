import math

import pytest
import torch

from vocabtp.dist._noise import exact_exp, exact_log, gumbel, mix, noise_bits, uniform

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def _mix(z):
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _bits(key, i):
    s = _mix(key)
    return _mix(_mix(i * GOLDEN + s) ^ _mix(~s)) >> 12


def test_mix_is_splitmix64():
    """The first outputs of SplitMix64 from seed 1234567, as published with it."""
    state = torch.tensor([1234567, 1234567 + (GOLDEN - 2**64)]) + (GOLDEN - 2**64)
    right = [6457827717110365317, 3203168211198807973]
    assert [v % 2**64 for v in mix(state).tolist()] == right


def test_bits_are_those_of_integer_arithmetic():
    keys = torch.tensor([0, 1, -1, -5, 2**63 - 1, -(2**63), 987654321])
    ids = torch.tensor([0, 1, 2, 151935, 2**32 - 1])
    right = [[_bits(key, i) for i in ids.tolist()] for key in keys.tolist()]
    assert noise_bits(keys[:, None], ids).tolist() == right


def test_uniform_is_open_at_both_ends(monkeypatch):
    for bits, value in ((0, 2.0**-53), (2**52 - 1, 1 - 2.0**-53)):
        monkeypatch.setattr(
            "vocabtp.dist._noise.noise_bits", lambda keys, ids, b=bits: torch.tensor([b])
        )
        u = uniform(torch.tensor([0]), torch.tensor([0]))
        assert u.item() == value
        assert 0 < u.item() < 1
        g = gumbel(torch.tensor([0]), torch.tensor([0])).item()
        assert math.isfinite(g)
        assert g == pytest.approx(-math.log(-math.log(value)), rel=1e-12)


def test_uniform_is_uniform_in_ids_and_in_keys():
    keys, ids = torch.arange(300), torch.arange(300)
    u = uniform(keys[:, None], ids)
    assert u.flatten().unique().numel() == 90_000
    for x in (u.flatten(), u[0], u[:, 0], u[:, 1], u.diagonal()):
        # Kolmogorov's distance to the diagonal, 0.1% level
        n = x.numel()
        gap = (x.sort().values - (torch.arange(n) + 0.5) / n).abs().max().item()
        assert gap < 1.95 / math.sqrt(n)
    # neighbours in either direction are uncorrelated
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        r = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
        assert abs(r) < 5 / math.sqrt(a.numel())


def test_log_and_exp_are_accurate_and_do_not_see_the_layout():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(10_007, dtype=torch.float64, generator=g)
    x[:6] = torch.tensor([2.0**-53, 1 - 2.0**-53, 0.5, math.sqrt(0.5), 1.0, 2.0])
    x[6:500] = torch.exp(torch.linspace(-700, 700, 494, dtype=torch.float64))
    log, exp = exact_log(x), exact_exp(-60 * x[500:])
    eps = torch.finfo(torch.float64).eps
    right = torch.tensor([math.log(v) for v in x.tolist()], dtype=torch.float64)
    assert ((log - right).abs() <= 4 * eps * right.abs()).all()
    right = torch.tensor([math.exp(-60 * v) for v in x[500:].tolist()], dtype=torch.float64)
    assert ((exp - right).abs() <= 8 * eps * right).all()
    for cut in (1, 3, 4096):
        assert torch.equal(exact_log(x[cut:]), log[cut:])
        wide = torch.ones(x.numel(), 3, dtype=torch.float64)
        wide[:, 1] = x
        assert torch.equal(exact_log(wide[cut:, 1]), log[cut:])
        assert torch.equal(exact_exp(-60 * wide[500:, 1][cut:]), exp[cut:])
