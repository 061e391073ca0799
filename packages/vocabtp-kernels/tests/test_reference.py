"""The judge is judged by torch's own functions, by hand, and by what it imports."""

import ast
from pathlib import Path

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from vocabtp.kernels import reference

INF = float("inf")


def sides(seed=0, rows=5, width=9):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=g, dtype=torch.float64) * 2 for _ in "st"]


def test_it_shares_no_code_with_what_it_judges():
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert imported == {"__future__", "collections.abc", "functools", "torch"}


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
def test_against_torch_distributions(temperature):
    s, t = sides()
    p, q = Categorical(logits=s / temperature), Categorical(logits=t / temperature)
    options = {"temperature": temperature}
    ids = torch.tensor([0, 8, 3, -100, 1])
    right = p.log_prob(ids.clamp(min=0)).masked_fill(ids == -100, 0.0)
    torch.testing.assert_close(reference.logprobs(s, ids, **options), right)
    torch.testing.assert_close(reference.entropy(s, **options), p.entropy())
    forward, reverse = kl_divergence(q, p), kl_divergence(p, q)
    torch.testing.assert_close(reference.kl_div(s, t, **options), forward)
    torch.testing.assert_close(reference.kl_div(s, t, reverse=True, **options), reverse)
    for beta in (0.25, 0.5, 0.9):
        m = Categorical(probs=beta * q.probs + (1 - beta) * p.probs)
        right = beta * kl_divergence(q, m) + (1 - beta) * kl_divergence(p, m)
        torch.testing.assert_close(reference.jsd(s, t, beta=beta, **options), right)
        scaled = reference.jsd(s, t, beta=beta, rescale=True, **options)
        torch.testing.assert_close(scaled, right / (beta * (1 - beta)))
    assert torch.equal(reference.jsd(s, t, beta=0.0), reference.kl_div(s, t))
    assert torch.equal(reference.jsd(s, t, beta=1.0), reference.kl_div(s, t, reverse=True))


def test_the_clip_caps_each_term():
    s, t = torch.tensor([0.0, 0.0]).double(), torch.tensor([0.9, 0.1]).double().log()
    # terms of KL(q || p): 0.9 log 1.8 and 0.1 log 0.2
    first, second = 0.9 * torch.tensor(1.8).log(), 0.1 * torch.tensor(0.2).log()
    assert abs(reference.kl_div(s, t) - (first + second)) < 1e-7
    assert abs(reference.kl_div(s, t, pointwise_clip=0.3) - (0.3 + second)) < 1e-7
    assert reference.jsd(s, t, pointwise_clip=1e-3).item() == 2e-3
    assert abs(reference.jsd(s, t, pointwise_clip=1e-3, rescale=True).item() - 8e-3) < 1e-15


def test_rows_without_a_number():
    x = torch.tensor(
        [[0.0, 1.0, -INF], [-INF, -INF, -INF], [0.0, float("nan"), 0.0], [INF, 0.0, 0]]
    )
    full = torch.zeros(4, 3)
    assert reference.entropy(x).isnan().tolist() == [False, True, True, True]
    assert reference.logprobs(x, torch.tensor([2, 0, 0, 1])).isnan().tolist() == [0, 1, 1, 1]
    assert reference.logprobs(x, torch.tensor([2, 0, 0, 1]))[0] == -INF
    assert reference.kl_div(x, full)[0] == INF
    assert reference.kl_div(x, full, reverse=True)[0].isfinite()
    assert reference.jsd(x, full)[0].isfinite()
    for value in (reference.kl_div(x, full), reference.kl_div(full, x), reference.jsd(x, full)):
        assert value[1:].isnan().all()


def test_gradients_of_rows_without_one():
    x = torch.tensor(
        [[0.0, 1.0, -INF], [-INF, -INF, -INF], [0.0, float("nan"), 0.0], [0.0, 1.0, 2.0]]
    )
    (grad,) = reference.gradients(reference.entropy, [x], [torch.tensor([1.0, 1.0, 1.0, 0.0])])
    assert grad[0].isfinite().all()
    assert grad[0, 2] == 0
    assert (grad[1] == 0).all()
    assert grad[2].isnan().all()
    assert (grad[3] == 0).all()
    ids = torch.tensor([0, 0, -100, -100])
    (grad,) = reference.gradients(reference.logprobs, [x], [torch.ones(4)], index=ids)
    assert (grad[1:] == 0).all()
    p = torch.softmax(x[0].double(), -1)
    torch.testing.assert_close(grad[0], torch.tensor([1.0, 0, 0]).double() - p)


def test_gradients_are_those_of_the_formulas():
    s, t = sides(2)
    p, q = s.softmax(-1), t.softmax(-1)
    ratio = (p / q).log()
    up = torch.randn(5, dtype=torch.float64)
    to_s, to_t = reference.gradients(reference.kl_div, [s, t], [up], reverse=True)
    kl = (p * ratio).sum(-1, keepdim=True)
    torch.testing.assert_close(to_s, up[:, None] * p * (ratio - kl))
    torch.testing.assert_close(to_t, up[:, None] * (q - p))
    m = 0.3 * q + 0.7 * p
    to_s, to_t = reference.gradients(reference.jsd, [s, t], [up], beta=0.3)
    lp, lq = (p / m).log(), (q / m).log()
    right = 0.7 * p * (lp - (p * lp).sum(-1, keepdim=True))
    torch.testing.assert_close(to_s, up[:, None] * right)
    right = 0.3 * q * (lq - (q * lq).sum(-1, keepdim=True))
    torch.testing.assert_close(to_t, up[:, None] * right)
