"""The configuration's sections, keys, types, ranges and the rules between keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from vocabtp.opsd._fields import Float, Name, Positive, RuleError, Section
from vocabtp.opsd._parallel import ParallelConfig
from vocabtp.opsd._templates import template_fields
from vocabtp.opsd._training import TrainingConfig

TOKENIZER_TEMPLATE = "tokenizer"


def _local_engine(value: Any) -> Any:
    return "local" if value == "hybrid_engine" else value


class StudentConfig(Section):
    """The model that learns."""

    model_name_or_path: Name = Field(
        description="Directory of a Hugging Face causal LM, or its name on the hub. A directory "
        "is looked for beside the configuration file first, then in the working directory."
    )
    dtype: Literal["bfloat16", "float32", "float16"] = Field(
        default="bfloat16",
        description="Data type of the weights and of the forward pass; float16 for the teacher "
        "only. The optimizer keeps a float32 copy of a bfloat16 student.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model's files."
    )


class TeacherConfig(StudentConfig):
    """The frozen model whose distribution is learnt."""

    offload_to_cpu: bool = Field(
        default=False,
        description="Keep the teacher's weights in host memory between its forward passes. With "
        "parallel.shard, each rank keeps its part there and copies a layer at a time.",
    )
    payload: Literal["logits", "hidden"] = Field(
        default="logits",
        description="What of the teacher waits on the host until the loss reads it: its logits, "
        "or the hidden states in front of its head, which are as many times fewer bytes as the "
        "vocabulary's part is wider than the model; the head's weights then stay on the device "
        "while the loss runs.",
    )
    prefetch_bytes: int = Field(
        default=2 << 30,
        ge=0,
        description="Bytes of the payload that may be on the device before the loss asks for them; "
        "they are copied behind the student's forward. 0 copies each chunk when it is asked for.",
    )
    pinned_bytes: Positive | None = Field(
        default=None,
        description="Bytes of host memory, page-locked beside an accelerator, that a rank may hold "
        "for the payload. A run whose longest answers could need more is refused before its first "
        "step. Null is no limit: as much is held as the largest payload so far needed.",
    )
    kind: Literal["model"] = Field(
        default="model", description="Where the teacher comes from: a model of its own."
    )
    prompt_template: str | None = Field(
        default=None,
        description="Text of the teacher's prompt, with {prompt} and any field of the data row as "
        "{field}; {{ and }} are braces. With chat messages it replaces the last user message. "
        "Null gives the teacher the student's prompt.",
    )

    @model_validator(mode="after")
    def _template_parses(self) -> Self:
        if self.prompt_template is not None:
            template_fields(self.prompt_template)
        return self


class RolloutConfig(Section):
    """How the student answers."""

    max_prompt_length: Positive = Field(
        default=1024,
        description="Longest prompt in tokens; a longer one is an error of its data line.",
    )
    max_response_length: Positive = Field(
        default=1024, description="Tokens after which an answer without an end token is cut."
    )
    temperature: Annotated[Float, Field(ge=0)] = Field(
        default=0.0, description="Sampling temperature; 0 takes the likeliest token (greedy)."
    )
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Sample from the likeliest tokens that together hold this probability.",
    )
    top_k: int = Field(
        default=-1, ge=-1, description="Sample from this many likeliest tokens; -1 for all of them."
    )
    n_samples_per_prompt: Positive = Field(
        default=1,
        description="Answers to each prompt in one optimizer step; more than 1 needs sampling.",
    )
    engine: Annotated[Literal["local"], BeforeValidator(_local_engine)] = Field(
        default="local",
        description="What generates the answers. `hybrid_engine` is read as local, with a notice.",
    )

    @model_validator(mode="after")
    def _sampling(self) -> Self:
        if self.top_k == 0:
            raise RuleError("rollout.top_k", "must be -1 (all tokens) or at least 1, got 0")
        if self.n_samples_per_prompt > 1 and self.temperature == 0:
            raise RuleError(
                "rollout.n_samples_per_prompt",
                f"is {self.n_samples_per_prompt}, but rollout.temperature 0 gives equal answers: "
                "set a temperature above 0",
            )
        return self


class DistillationConfig(Section):
    """The loss between student and teacher."""

    loss_type: Literal["reverse_kl", "forward_kl", "jsd"] = Field(
        default="reverse_kl",
        description="reverse_kl is KL(student || teacher), forward_kl is KL(teacher || student), "
        "jsd the generalized Jensen-Shannon divergence.",
    )
    beta: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.5,
        description="Weight of the teacher in jsd's mixture: 0 is forward KL, 1 is reverse KL. "
        "Only for loss_type jsd.",
    )
    rescale: bool = Field(
        default=False,
        description="Divide jsd by beta (1 - beta), so that it does not vanish near the ends. "
        "Only for loss_type jsd.",
    )
    pointwise_clip: Annotated[Float, Field(gt=0)] | None = Field(
        default=None, description="Cap of each vocabulary entry's term of the loss; null for none."
    )
    temperature: Annotated[Float, Field(gt=0)] = Field(
        default=1.0, description="Divides the logits of both sides before the softmax."
    )
    temperature_squared: bool = Field(
        default=True,
        description="Multiply the loss by temperature squared, so that its gradient keeps its "
        "size at other temperatures.",
    )
    chunk_size: Positive = Field(
        default=512,
        description="Rows of the loss at a time; bounds memory, does not change the result.",
    )
    loss_backend: Literal["vocab_parallel", "gathered", "dense"] = Field(
        default="vocab_parallel",
        description="vocab_parallel computes on the heads' shards, gathered gathers their logits "
        "first, dense keeps whole heads on every rank. The losses agree to rounding.",
    )
    loss_scale: Literal["global_tokens", "micro_batch_mean"] = Field(
        default="global_tokens",
        description="global_tokens is the mean over all response tokens of the optimizer step, "
        "micro_batch_mean the mean of the micro-batches' means.",
    )
    vocab: Literal["own", "common"] = Field(
        default="own",
        description="own keeps the heads as they are and refuses different widths; common cuts "
        "both to the tokenizer's ids when they are loaded.",
    )

    @model_validator(mode="after")
    def _jsd_only(self) -> Self:
        if self.loss_type == "jsd":
            return self
        for key, neutral in (("beta", 0.5), ("rescale", False)):
            if getattr(self, key) != neutral:
                raise RuleError(
                    f"distillation.{key}",
                    f"has no effect with distillation.loss_type {self.loss_type}: "
                    "set loss_type jsd or leave it out",
                )
        return self


class DataConfig(Section):
    """The prompts."""

    path: Name = Field(
        description="JSONL file of training prompts, one JSON object a line. Looked for beside the "
        "configuration file first, then in the working directory."
    )
    prompt_field: Name = Field(
        default="prompt", description="Field of the prompt: a string, or a list of chat messages."
    )
    answer_field: Name = Field(
        default="answer", description="Field of the right answer, which evaluation compares with."
    )
    chat_template: Name | None = Field(
        default=None,
        description="Template for the prompts: null renders chat messages by the tokenizer's own "
        "template and leaves strings as they are; `tokenizer` also makes each string a user "
        "message; anything else is a Jinja template (or a file with one) for both.",
    )
    shuffle: bool = Field(default=True, description="A new order of the prompts in every epoch.")
    on_error: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="refuse stops at the start with the lines that cannot be used; skip leaves "
        "them out and counts them.",
    )
    eval_path: Name | None = Field(
        default=None,
        description="JSONL file of held-out prompts with answers; null for no evaluation.",
    )
    eval_limit: Positive | None = Field(
        default=None, description="Evaluate only the first so many held-out prompts; null for all."
    )

    @model_validator(mode="after")
    def _two_fields(self) -> Self:
        if self.answer_field == self.prompt_field:
            raise RuleError(
                "data.answer_field", f"and data.prompt_field are both {self.prompt_field!r}"
            )
        return self


class Sections(Section):
    """All keys of a configuration."""

    student: StudentConfig
    teacher: TeacherConfig
    rollout: RolloutConfig = RolloutConfig()
    distillation: DistillationConfig = DistillationConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    deepspeed_config: dict[str, Any] | None = Field(
        default=None,
        description="DeepSpeed's own configuration: a JSON file or its content. What keys of the "
        "sections say too must agree with them, or fills those that are left out.",
    )

    @model_validator(mode="after")
    def _between_sections(self) -> Self:
        t = self.training
        if self.student.dtype == "float16":
            raise RuleError(
                "student.dtype",
                "must be bfloat16 or float32, got 'float16': without loss scaling, small "
                "gradients would be lost",
            )
        dtypes = (self.student.dtype, self.teacher.dtype)
        if t.attention == "flash" and ("float32" in dtypes or self.parallel.device == "cpu"):
            raise RuleError(
                "training.attention",
                "is flash, which needs a GPU and student.dtype and teacher.dtype bfloat16: change "
                "those, or take sdpa",
            )
        if t.compile and self.parallel.engine != "torch":
            raise RuleError(
                "training.compile",
                f"does not go with parallel.engine {self.parallel.engine}, whose hooks cannot be "
                "compiled: set it to false",
            )
        if self.parallel.tp_by == "autotp" and self.distillation.loss_backend == "dense":
            raise RuleError(
                "distillation.loss_backend",
                "is dense, which keeps whole heads, but parallel.tp_by autotp cuts them: take "
                "vocab_parallel or gathered, or set parallel.tp_by to plan",
            )
        if self.teacher.offload_to_cpu and self.parallel.teacher_shard != "none":
            raise RuleError(
                "teacher.offload_to_cpu",
                "does not go with parallel.teacher_shard zero3, which leaves a rank only its part "
                "of the teacher: set one of them back",
            )
        if t.eval_steps and self.data.eval_path is None:
            raise RuleError(
                "training.eval_steps", f"is {t.eval_steps}, but data.eval_path is not set"
            )
        sizes = (t.train_batch_size, t.micro_batch_size_per_gpu, t.gradient_accumulation_steps)
        if None not in sizes:
            train, micro, steps = (int(n or 0) for n in sizes)
            samples = self.rollout.n_samples_per_prompt
            if (train * samples) % (micro * steps):
                raise RuleError(
                    "training.train_batch_size",
                    f"{train} x rollout.n_samples_per_prompt {samples} is no multiple of "
                    f"micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps}",
                )
        return self
