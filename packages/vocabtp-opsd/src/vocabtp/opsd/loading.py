"""Load a Hugging Face causal LM onto this layout: cut over the ranks, each with its own part."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from vocabtp.dist import VocabShard
from vocabtp.opsd.attention import implementation
from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.layers import checkpoint_layers, compile_layers
from vocabtp.opsd.local_shards import Skeleton, fill, first_reason, read_skeleton
from vocabtp.opsd.model import LanguageModel
from vocabtp.opsd.model_files import (
    check_context,
    check_dtypes,
    check_heads,
    check_layout,
    check_prompts,
    check_width,
    dropout_notice,
    read_config,
    read_model,
)
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.sharding import shard_module
from vocabtp.opsd.tp_plan import apply_plan

if TYPE_CHECKING:
    from vocabtp.opsd.config import Config, StudentConfig
    from vocabtp.opsd.engine.autotp import Cut

_log = logging.getLogger("vocabtp.opsd")


def load_models(
    config: Config, layout: Layout, tokenizer_length: int, *, teacher_prompt: int | None = None
) -> tuple[LanguageModel, LanguageModel]:
    """Load student and teacher; all that their configurations tell is checked before any weight.

    Args:
        config: The run's configuration.
        layout: This process's place.
        tokenizer_length: Ids of the student's tokenizer, `len(tokenizer)`.
        teacher_prompt: Tokens of the longest prompt, where the teacher reads prompts of its own.

    Returns:
        The student, in training mode, and the frozen teacher, with heads of one layout.

    Raises:
        ModelError: On every rank.
    """
    options = _options(config, tokenizer_length)
    with layout.together():
        student = read_config(config.student, "student")
        teacher = read_config(config.teacher, "teacher")
        check_heads(student, teacher, tokenizer_length, config)
        check_context(student, teacher, config, teacher_prompt)
        cut = (layout.tp, options["cut_vocab"], options["tp_by"])
        check_layout(config.student, student, "student", *cut)
        check_layout(config.teacher, teacher, "teacher", *cut)
        if layout.is_main and (line := dropout_notice(config.student, student, layout.tp)):
            _log.warning(line)
        if config.parallel.engine == "deepspeed":
            check_dtypes(config.student, student, "student")
            if config.parallel.teacher_shard == "zero3" and layout.dp > 1:
                check_dtypes(config.teacher, teacher, "teacher")
    pair = (
        load_model(config.student, layout, trainable=True, hf_config=student, **options),
        load_model(
            config.teacher,
            layout,
            trainable=False,
            hf_config=teacher,
            offload=config.teacher.offload_to_cpu,
            **options,
        ),
    )
    with layout.together():
        if config.training.compile:
            for model, trained in zip(pair, (True, False), strict=True):
                compile_layers(model.module, model.name, trained=trained)
        if config.training.activation_checkpointing:
            checkpoint_layers(pair[0].module, pair[0].name)
    if pair[0].shard != pair[1].shard:
        raise ModelError(
            f"the heads have {pair[0].shard.global_size} and {pair[1].shard.global_size} columns, "
            "which is not what their configurations say: set distillation.vocab to common"
        )
    return pair


def load_student(
    config: Config, layout: Layout, tokenizer_length: int, *, answers: bool
) -> LanguageModel:
    """Load the student alone, to put a checkpoint's weights into it.

    What only training uses is not looked at: the teacher, what compiles or runs layers again, the
    engine. A student that answers is the one of training, cut by whoever cuts it there and with its
    attention, so that it rounds alike. Else the plan cuts it, whoever did in training: checkpoints
    are those of any layout.

    Args:
        config: The run's configuration.
        layout: This process's place.
        tokenizer_length: As `load_models`.
        answers: Whether it is to answer prompts, which must fit it.

    Raises:
        ModelError: On every rank.
    """
    options = _options(config, tokenizer_length)
    if not answers:
        options |= {"tp_by": "plan", "attention": None}
    with layout.together():
        student = read_config(config.student, "student")
        if answers:
            check_width(config.student, student, "student", tokenizer_length)
            check_prompts(student, config)
        cut = (layout.tp, options["cut_vocab"], options["tp_by"])
        check_layout(config.student, student, "student", *cut)
    return load_model(config.student, layout, trainable=True, hf_config=student, **options)


def load_model(
    section: StudentConfig,
    layout: Layout,
    *,
    trainable: bool,
    cut_vocab: bool = True,
    tp_by: str = "plan",
    vocab_width: int | None = None,
    attention: str | None = None,
    hf_config: Any = None,
    offload: bool = False,
) -> LanguageModel:
    """Load one model, cut it over the tensor-parallel ranks and put it on the device.

    A rank reads and holds its own part of the weights only, where the model's files are plain
    safetensors; else, with a notice, every rank reads the whole model and cuts it.

    Args:
        section: `config.student` or `config.teacher`.
        layout: This process's place.
        trainable: The student: weights get gradients and the mode is training. Otherwise frozen
            and in evaluation mode.
        cut_vocab: Cut embedding and head over the vocabulary; False keeps both whole.
        tp_by: As `place_model`.
        vocab_width: Keep only so many ids of embedding and head; None keeps all.
        attention: Attention implementation; None for the library's choice.
        hf_config: The model's configuration if it was read already.
        offload: As `place_model`.

    Raises:
        ModelError: On every rank: no such model, files whose keys or shapes are not the model's,
            or a layout that the model does not fit.
    """
    role = "student" if trainable else "teacher"
    with layout.together():
        if hf_config is None:
            hf_config = read_config(section, role)
            check_layout(section, hf_config, role, layout.tp, cut_vocab, tp_by)
        skeleton = read_skeleton(section, hf_config, role, attention, layout)
    name = f"{role} {section.model_name_or_path!r}"
    reason = first_reason(skeleton, layout)
    if reason is not None and layout.is_main:
        _log.warning("%s: every rank reads all of its weights: %s", name, reason)
    with layout.together():
        module = skeleton.module
        if reason is not None:
            module = read_model(section, hf_config, role, attention)
        if vocab_width is not None:
            _keep_ids(module, vocab_width, role)
    return place_model(
        module,
        layout,
        name=name,
        trainable=trainable,
        cut_vocab=cut_vocab,
        tp_by=tp_by,
        skeleton=skeleton if reason is None else None,
        offload=offload,
    )


def place_model(
    module: Any,
    layout: Layout,
    *,
    name: str,
    trainable: bool,
    cut_vocab: bool = True,
    tp_by: str = "plan",
    skeleton: Skeleton | None = None,
    offload: bool = False,
) -> LanguageModel:
    """Cut a whole model that every rank holds, and put this rank's part on the device.

    Args:
        module: A Hugging Face causal LM, equal on all tensor-parallel ranks; changed in place.
        layout: This process's place.
        name: What messages call the model.
        trainable: Whether weights get gradients and the mode is training.
        cut_vocab: Cut embedding and head over the vocabulary; False keeps both whole.
        tp_by: "plan", or "autotp" for DeepSpeed's own tensor parallelism, which cuts the head.
        skeleton: Where the weights are, if `module` has none yet: each rank then reads its part.
        offload: Where copies share the weights, keep a rank's part of them in host memory. Weights
            that are not shared are left to the caller.
    """
    module.requires_grad_(trainable)
    module.train(trainable)
    cut: Cut | None = None
    if layout.mesh is not None and layout.tp > 1:
        if tp_by == "autotp":
            from vocabtp.opsd.engine import autotp

            with layout.together():
                cut = autotp.cut(module, layout, name)
        else:
            apply_plan(module, layout.mesh["tp"], cut_vocab=cut_vocab, name=name)
        if cut_vocab:
            module.generate = _blocked_generate

    # how copies that share the weights keep them
    shared = {"rounded": module.get_output_embeddings().weight.dtype, "on_host": offload}
    options: dict[str, Any] = shared if layout.sharded else {}

    def read(unit: nn.Module) -> None:
        if skeleton is not None:
            with layout.together():
                fill(module, skeleton.places, layout, name, unit, **options)

    if layout.mesh is None or not layout.sharded:
        read(module)
        module.to(layout.device)
    weight = module.get_output_embeddings().weight
    if cut is not None:
        shard = cut.finish()
    elif isinstance(weight, DTensor):
        # the widths that were really cut, not a formula of our own
        shard = VocabShard.resolve(weight.to_local().shape[0], layout.tp_group)
    else:
        shard = VocabShard(0, weight.shape[0], weight.shape[0], None)
    if layout.mesh is not None and layout.sharded:
        # to the device too, one part at a time
        shard_module(
            module,
            layout.mesh["dp"],
            free=layout.shard == "zero3",
            name=name,
            fill=None if skeleton is None else read,
            offload=offload,
        )
    return LanguageModel(module=module, shard=shard, layout=layout, name=name)


def _blocked_generate(*_args: Any, **_options: Any) -> NoReturn:
    raise RuntimeError(
        "generate() on a head that is cut over ranks would silently return wrong tokens: "
        "use vocabtp.opsd.rollout.generate"
    )


def _options(config: Config, tokenizer_length: int) -> dict[str, Any]:
    """How a model of the run is loaded, whichever it is."""
    common = config.distillation.vocab == "common"
    return {
        "tp_by": config.parallel.tp_by,
        "cut_vocab": config.distillation.loss_backend != "dense",
        "vocab_width": tokenizer_length if common else None,
        "attention": implementation(config.training.attention),
    }


def _keep_ids(module: Any, width: int, role: str) -> None:
    have = module.get_output_embeddings().weight.shape[0]
    if width > have:
        raise ModelError(f"{role}: {width} ids were asked for, but its head has only {have}")
    if width < have:
        # embedding too: what is saved must load again as a model of this width
        module.resize_token_embeddings(width, mean_resizing=False)
