"""One optimizer step over models whose logits are given: what is weighed how, and what stays."""

import dataclasses
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import vocabtp.opsd.step as step_module
from vocabtp.cache import TeacherLogitCache
from vocabtp.dist import VocabShard
from vocabtp.opsd.config import Config
from vocabtp.opsd.engine import TorchEngine
from vocabtp.opsd.loss import distill_loss
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.step import Stepper


def config(micro_batches, **distillation):
    return Config.model_validate(
        {
            "student": {"model_name_or_path": "s"},
            "teacher": {"model_name_or_path": "t"},
            "data": {"path": "p", "shuffle": False},
            "distillation": distillation,
            "training": {
                "train_batch_size": micro_batches,
                "micro_batch_size_per_gpu": 1,
                "optimizer": "sgd",
                "learning_rate": 1.0,
                "lr_scheduler": "constant",
                "max_grad_norm": 0,
                "max_steps": 5,
            },
        }
    )


@dataclasses.dataclass
class Answer:
    """A rollout, as far as a step reads it."""

    which: int
    response_lengths: list[int]
    truncated: list[bool]
    tokens: torch.Tensor = None
    attention_mask: torch.Tensor = None
    response_mask: torch.Tensor = None


class Numbers(int):
    """So many prompts, each known by its index alone."""

    __len__ = int.__int__

    def for_student(self, indices):
        return indices

    def for_teacher(self, indices):
        return None


class World:
    """A student with logits `base[i] + bias` for sequence i; a teacher with logits of its own."""

    def __init__(self, monkeypatch, student, teacher, settings):
        self.student, self.teacher = student, teacher
        self.module = nn.Module()
        self.module.bias = nn.Parameter(torch.zeros(student[0].shape[1]))
        self.caches, self.ahead = [], []
        self.budget = 1 << 20
        self.now = None
        self.most = 0
        model = SimpleNamespace(
            response_logits=self.respond,
            shard=VocabShard(0, student[0].shape[1], student[0].shape[1]),
            module=self.module,
        )
        models = SimpleNamespace(
            student=model, teacher=SimpleNamespace(score=self.score), specials=None
        )
        prompts = Numbers(len(student))
        monkeypatch.setattr(step_module, "generate", self.generate)
        layout = Layout()
        self.engine = TorchEngine(self.module, settings.training, layout, 5)
        self.stepper = Stepper(settings, layout, prompts, models, self.engine)

    def generate(self, model, prompts, ids, **_):
        return Answer(prompts[0], [len(self.student[prompts[0]])], [False])

    def respond(self, *_):
        # what the loss will read is on its way before the student begins
        self.ahead.append(self.caches[-1]().prefetched_nbytes)
        return self.student[self.now] + self.module.bias

    def score(self, rollout, prompts):
        self.now = rollout.which
        cache = TeacherLogitCache.store(
            self.teacher[self.now], dtype=torch.float32, prefetch_bytes=self.budget
        )
        self.caches.append(weakref.ref(cache))
        self.most = max(self.most, self.alive())
        return cache

    def alive(self):
        return sum(1 for ref in self.caches if ref() is not None and not ref().closed)


def uneven():
    """B34: one token with reverse KL 2, and nine with reverse KL 1."""
    p = torch.tensor([30.0, -30.0])

    def q(divergence):
        share = torch.tensor(-float(divergence)).exp()
        return torch.stack([share.log(), (1 - share).log()])

    return [p.repeat(1, 1), p.repeat(9, 1)], [q(2).repeat(1, 1), q(1).repeat(9, 1)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("scale", "right"), [("global_tokens", 1.1), ("micro_batch_mean", 1.5)])
def test_every_token_weighs_the_same_unless_told(monkeypatch, order, scale, right):
    student, teacher = ([side[i] for i in order] for side in uneven())
    world = World(monkeypatch, student, teacher, config(2, loss_scale=scale))
    report = world.stepper.run(0)
    assert report.metrics["loss"] == pytest.approx(right, abs=1e-6)
    # metrics of rows are token means whatever is optimised
    assert report.metrics["reverse_kl"] == pytest.approx(1.1, abs=1e-6)
    assert report.metrics["response_tokens"] == 10


@pytest.mark.parametrize("scale", ["global_tokens", "micro_batch_mean"])
def test_accumulated_gradient_is_that_of_one_batch(monkeypatch, scale):
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 9, 4)
    student = [torch.randn(n, 5, generator=generator) for n in lengths]
    teacher = [torch.randn(n, 5, generator=generator) for n in lengths]
    world = World(monkeypatch, student, teacher, config(3, loss_scale=scale))
    report = world.stepper.run(0)
    bias = torch.zeros(5, requires_grad=True)
    if scale == "global_tokens":
        truth = distill_loss(torch.cat(student) + bias, torch.cat(teacher))
    else:
        each = [distill_loss(s + bias, t) for s, t in zip(student, teacher, strict=True)]
        truth = torch.stack(each).mean()
    truth.backward()
    # what is logged is what is optimised
    assert report.metrics["loss"] == pytest.approx(truth.item(), rel=1e-6)
    torch.testing.assert_close(world.module.bias.detach(), -bias.grad, rtol=1e-5, atol=1e-7)
    assert report.result.grad_norm == pytest.approx(bias.grad.norm().item(), rel=1e-5)


def test_one_teacher_cache_is_alive_and_none_after_a_step_or_an_error(monkeypatch):
    """B44, with accumulation 8."""
    generator = torch.Generator().manual_seed(0)
    student = [torch.randn(64, 32, generator=generator) for _ in range(8)]
    world = World(monkeypatch, student, student[::-1], config(8, chunk_size=8))
    world.budget = 20 * 32 * 4  # two of the eight chunks
    world.stepper.run(0)
    assert len(world.caches) == 8
    assert world.ahead == [16 * 32 * 4] * 8
    assert world.most == 1
    assert world.alive() == 0

    def fail(*_, **__):
        assert world.alive() == 1
        raise RuntimeError("the loss broke")

    monkeypatch.setattr(step_module, "distill_loss", fail)
    with pytest.raises(RuntimeError, match="the loss broke") as caught:
        world.stepper.run(1)
    # even while the traceback still holds the frame
    assert caught.value.__traceback__ is not None
    assert world.alive() == 0


class _Widest(TorchDispatchMode):
    """The most elements of any fp32 tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_fp32_copy_of_everything_exists():
    """B44: B=1, T=64, V=4096 in chunks of 8 positions."""
    student = torch.randn(1, 64, 4096).bfloat16().requires_grad_()
    cache = TeacherLogitCache.store(torch.randn(1, 64, 4096).bfloat16())
    mask = torch.ones(1, 64, dtype=torch.long)
    mask[:, 0] = 0
    with _Widest() as widest:
        loss = distill_loss(student, cache, mask, chunk_size=8)
        loss.backward()
    # three working copies of a chunk lie side by side
    assert 0 < widest.elements <= 3 * 8 * 4096
    assert student.grad.dtype == torch.bfloat16
    assert student.grad[0, :63].abs().sum() > 0


def test_a_micro_batch_without_tokens_is_passed_over(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    student = [torch.randn(n, 5, generator=generator) for n in (0, 3, 0)]
    teacher = [torch.randn(n, 5, generator=generator) for n in (0, 3, 0)]
    for scale in ("global_tokens", "micro_batch_mean"):
        world = World(monkeypatch, student, teacher, config(3, loss_scale=scale))
        report = world.stepper.run(0)
        assert len(world.caches) == 1
        assert report.metrics["loss"] == pytest.approx(distill_loss(student[1], teacher[1]).item())
        assert report.metrics["empty_responses"] == 2
        assert report.result.applied
