"""The configuration's section `parallel`: its keys, types and ranges."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from vocabtp.opsd._fields import Positive, RuleError, Section


class ParallelConfig(Section):
    """How the work is split over ranks."""

    tp: Positive = Field(
        default=1,
        description="Ranks that share one copy of the models (tensor parallelism). They draw one "
        "dropout noise, which activations that all of them hold need; of attention dropout, heads "
        "of different ranks get the same noise.",
    )
    engine: Literal["torch", "deepspeed"] = Field(
        default="torch",
        description="What holds optimizer and gradients: torch is PyTorch alone, deepspeed needs "
        "the extra `vocabtp-opsd[deepspeed]`.",
    )
    tp_by: Literal["plan", "autotp"] = Field(
        default="plan",
        description="What cuts the models over the tp ranks: plan is this package's own, by the "
        "plan that a model carries; autotp, for engine deepspeed, is DeepSpeed's AutoTP. Left out, "
        "it is autotp where engine is deepspeed and deepspeed_config has "
        "tensor_parallel.autotp_size above 1.",
    )
    shard: Literal["none", "zero2", "zero3"] = Field(
        default="none",
        description="What is sharded over the data-parallel ranks: none keeps whole replicas, "
        "zero2 shards gradients and optimizer, zero3 also drops a layer's gathered weights between "
        "forward and backward. At rest both keep shards of student and teacher only. With engine "
        "deepspeed it is the student's ZeRO stage: none is 0, zero2 is 2, zero3 is refused.",
    )
    teacher_shard: Literal["none", "zero3"] = Field(
        default="none",
        description="With engine deepspeed: zero3 keeps only a part of the teacher's weights on "
        "each data-parallel rank, and gathers a layer at a time.",
    )
    nproc: Positive | None = Field(
        default=None,
        description="Ranks that the command starts on this machine; null leaves that to torchrun.",
    )
    device: Literal["auto", "cpu", "cuda", "xpu"] = Field(
        default="auto", description="auto takes an accelerator if there is one, else the CPU."
    )

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.nproc is not None and self.nproc % self.tp:
            raise RuleError(
                "parallel.nproc", f"is {self.nproc}, which parallel.tp {self.tp} does not divide"
            )
        return self

    @model_validator(mode="after")
    def _engine(self) -> Self:
        if self.engine == "deepspeed" and self.shard == "zero3":
            raise RuleError(
                "parallel.shard",
                "is zero3, which is for parallel.engine torch: with deepspeed set none or zero2, "
                "and parallel.teacher_shard zero3 for the teacher",
            )
        if self.engine == "torch" and self.tp_by == "autotp":
            raise RuleError(
                "parallel.tp_by",
                "is autotp, which is for parallel.engine deepspeed: set that, or plan here",
            )
        if self.engine == "torch" and self.teacher_shard != "none":
            raise RuleError(
                "parallel.teacher_shard",
                "is for parallel.engine deepspeed; with torch, parallel.shard shards the teacher",
            )
        return self
