"""The configuration's section `training`: its keys, types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from vocabtp.opsd._fields import Float, Name, Positive, RuleError, Section, Seed


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class TrainingConfig(Section):
    """Steps, optimizer, checkpoints."""

    train_batch_size: Positive | None = Field(
        default=None,
        description="Prompts of one optimizer step, over all data-parallel ranks. Of this key, "
        "micro_batch_size_per_gpu and gradient_accumulation_steps any may be left out: "
        "train_batch_size x n_samples_per_prompt = micro_batch_size_per_gpu x "
        "gradient_accumulation_steps x data-parallel ranks. With none of them given it is 8.",
    )
    micro_batch_size_per_gpu: Positive | None = Field(
        default=None,
        description="Sequences of one forward pass on one rank. 1 if it cannot be derived.",
    )
    gradient_accumulation_steps: Positive | None = Field(
        default=None, description="Forward passes whose gradients add up to one optimizer step."
    )
    learning_rate: Annotated[Float, Field(gt=0)] = Field(
        default=1e-6, description="Peak learning rate, reached after the warm-up."
    )
    lr_scheduler: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="How the learning rate falls from its peak to 0 after the warm-up.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Optimizer steps in which the learning rate rises from 0 to its peak.",
    )
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="The update rule.")
    weight_decay: Annotated[Float, Field(ge=0)] = Field(
        default=0.0, description="Decoupled weight decay (adamw), or an L2 term (sgd)."
    )
    adam_betas: Annotated[
        tuple[Annotated[Float, Field(ge=0, lt=1)], Annotated[Float, Field(ge=0, lt=1)]],
        BeforeValidator(_as_tuple),
    ] = Field(default=(0.9, 0.999), description="AdamW's decay rates of the two moments.")
    adam_eps: Annotated[Float, Field(gt=0)] = Field(
        default=1e-8, description="AdamW's term that keeps the denominator from 0."
    )
    max_grad_norm: Annotated[Float, Field(ge=0)] = Field(
        default=1.0, description="Gradients are scaled down to this norm; 0 turns clipping off."
    )
    max_skipped_steps: Positive = Field(
        default=5,
        description="A step whose loss or gradient norm is NaN or infinite is skipped; after so "
        "many of them in a row the run stops.",
    )
    num_train_epochs: Positive = Field(
        default=1,
        description="Passes over the prompts. The last step of the last pass may be a short one.",
    )
    max_steps: int = Field(
        default=-1,
        ge=-1,
        description="Optimizer steps in all, whatever num_train_epochs says; -1 for off.",
    )
    attention: Literal["sdpa", "math", "eager", "flash"] = Field(
        default="sdpa",
        description="The models' attention: sdpa is PyTorch's choice of kernel, math is PyTorch "
        "without fused kernels, eager is the model's own code, flash is the package flash-attn "
        "(for CUDA, bfloat16 or a float16 teacher).",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Keep of each of the student's layers only its input, and run the layer again "
        "in the backward: less memory for about a third more time there.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the decoder layers with torch.compile, for the passes over whole "
        "sequences. The first steps take minutes. Needs a C++ compiler.",
    )
    seed: Seed = Field(
        default=42, description="Order of the prompts, sampling and dropout all derive from it."
    )
    logging_steps: Positive = Field(
        default=10, description="Steps between two lines of output; metrics.jsonl has every step."
    )
    eval_steps: int = Field(
        default=0,
        ge=0,
        description="Steps between two evaluations; 0 for only before and after training.",
    )
    save_steps: int = Field(
        default=500, ge=0, description="Steps between two checkpoints; 0 for only one at the end."
    )
    keep_checkpoints: Positive = Field(default=2, description="Newest checkpoints that are kept.")
    async_save: bool = Field(
        default=False,
        description="Write checkpoints while training goes on. It waits only for a copy of all "
        "that is saved in host memory, and for the checkpoint before.",
    )
    resume: Literal["auto", "never"] = Field(
        default="auto",
        description="auto continues from the newest complete checkpoint in save_dir; never starts "
        "from the beginning and refuses a save_dir that holds checkpoints.",
    )
    save_dir: Name = Field(
        default="opsd_output",
        description="Output directory: config.yaml, metrics.jsonl, TensorBoard events, "
        "checkpoints, report.html. Relative to the working directory.",
    )

    @model_validator(mode="after")
    def _steps(self) -> Self:
        if self.max_steps == 0:
            raise RuleError("training.max_steps", "must be -1 (off) or at least 1, got 0")
        return self
