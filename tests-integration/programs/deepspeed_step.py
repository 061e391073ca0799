"""A DeepSpeed program: AutoTP with a vocabulary-parallel head, a loss from sharded logits.

Nothing of vocabtp is in it; test_deepspeed_program.py runs it as it is, and once more with the
import of the ops changed.
"""

import deepspeed
import torch
from deepspeed.sequence.vocab_parallel_ops import (
    vocab_parallel_entropy,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
)

from tiny_models import tiny_model

VOCAB = 37  # 19 and 18 columns


def sharded(model, optimizer=None, parameters=None):
    """The model under DeepSpeed, its head cut over two ranks; and the head."""
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=parameters,
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 0},
            "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
            "zero_allow_untested_optimizer": True,
        },
    )
    return engine, engine.module.lm_head


def train(steps):
    """Values, gradients of the logits and weights of `steps` updates."""
    student = tiny_model("qwen2", seed=0, vocab=VOCAB)
    teacher = tiny_model("qwen2", seed=1, vocab=VOCAB)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, eps=1e-3)
    engine, head = sharded(student, optimizer, student.parameters())
    frozen, _ = sharded(teacher)
    group = head.mp_group
    bounds = (head.vocab_start_index, head.vocab_end_index, head.vocab_size)

    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (3, 9), generator=draw)
    targets = ids[:, 1:].clone()
    targets[0, :4] = -100
    advantage = torch.randn(3, 8, generator=draw)
    out = []
    for _ in range(steps):
        logits = engine(input_ids=ids).logits
        logits.retain_grad()
        with torch.no_grad():
            wanted = frozen(input_ids=ids).logits[:, :-1]
        short = logits[:, :-1]  # a view with gaps between its rows
        logprobs = vocab_parallel_logprobs(short, targets, group, *bounds)
        entropy = vocab_parallel_entropy(short, tp_group=group)
        forward = vocab_parallel_kl_div(short, wanted, tp_group=group)
        reverse = vocab_parallel_kl_div(short, wanted, True, group)
        # the teacher's likeliest ids of this rank's columns, and their probabilities
        several = (ids[:, :-1, None] + torch.arange(4)) % VOCAB
        ranked = vocab_parallel_logprobs(short, several, group, bounds[0], bounds[1])
        loss = (reverse + 0.5 * forward - 0.1 * entropy - advantage * logprobs).mean()
        loss = loss - 0.01 * ranked.mean()
        engine.backward(loss)
        values = (loss, logprobs, entropy, forward, reverse, ranked)
        out.append([*(value.detach().clone() for value in values), logits.grad.clone()])
        engine.step()
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return out, weights
