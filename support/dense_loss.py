"""The distillation loss of whole rows in fp64, and the kinds of it that tests compare."""

import torch

CASES = [
    {"loss_type": "reverse_kl"},
    {"loss_type": "forward_kl", "temperature": 1.7},
    {"loss_type": "reverse_kl", "pointwise_clip": 0.05, "temperature": 0.8},
    {"loss_type": "jsd", "beta": 0.3, "rescale": True},
    {"loss_type": "jsd", "beta": 0.5, "pointwise_clip": 0.05, "temperature_squared": False},
]


def dense(s, t, *, loss_type, beta=0.5, rescale=False, pointwise_clip=None, temperature=1.0):
    """Each row's divergence in fp64, from log-probabilities of the whole vocabulary."""
    p, q = ((x.double() / temperature).log_softmax(-1) for x in (s, t))
    if loss_type == "reverse_kl":
        terms = p.exp() * (p - q)
    elif loss_type == "forward_kl":
        terms = q.exp() * (q - p)
    else:
        m = torch.log(beta * q.exp() + (1 - beta) * p.exp())
        terms = beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)
    if pointwise_clip is not None:
        terms = terms.clamp(max=pointwise_clip)
    return terms.sum(-1) / (beta * (1 - beta) if rescale else 1)


def logits(*shape, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


def scale_of(options):
    return options.get("temperature", 1.0) ** 2 if options.get("temperature_squared", True) else 1.0


def value_options(options):
    return {k: v for k, v in options.items() if k != "temperature_squared"}
