"""A distillation run from its configuration: check, train, evaluate, roll out, export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vocabtp.opsd._console import complain
from vocabtp.opsd.attention import attention_kernels
from vocabtp.opsd.checkpoint import Checkpoints
from vocabtp.opsd.checkpoint_files import Saved, read_saved
from vocabtp.opsd.config import Config
from vocabtp.opsd.data import total_steps
from vocabtp.opsd.engine import Engine, TorchEngine
from vocabtp.opsd.engine.places import place_of
from vocabtp.opsd.errors import CheckpointError, ConfigError
from vocabtp.opsd.evaluate import answer_all, evaluate
from vocabtp.opsd.export import export_model
from vocabtp.opsd.interrupt import InterruptFlag
from vocabtp.opsd.model import LanguageModel
from vocabtp.opsd.parallel import make_layout
from vocabtp.opsd.phases import Phases
from vocabtp.opsd.resume import check_resume
from vocabtp.opsd.run import Run, TrainResult
from vocabtp.opsd.session import (
    Answerer,
    Inputs,
    Models,
    Prompts,
    read_answerer,
    read_held_out,
    read_inputs,
    read_models,
    read_prompts,
    read_student,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vocabtp.opsd.engine.deepspeed_engine import DeepSpeedEngine


class Trainer:
    """A distillation run from its configuration.

    Every rank of the run constructs one and calls the same methods in the same order. What `train`
    or `check` loads is kept for calls after it; without it, `evaluate`, `rollout` and `export` each
    load what they need and let go of it.

    Args:
        config: From `load_config`.

    Raises:
        UserError: On every rank: ranks, device or batch sizes that do not fit together.
    """

    def __init__(self, config: Config) -> None:
        self.phases = Phases()
        parallel = config.parallel
        if parallel.engine != "torch":
            # what another engine shards it shards by itself, from whole copies
            parallel = parallel.model_copy(update={"shard": "none"})
        self.layout = make_layout(parallel)
        self.config = config.for_world(self.layout.world)
        self.save_dir = Path(self.config.training.save_dir)
        self.checkpoints = Checkpoints(
            self.save_dir / "checkpoints", self.layout, self.config.training.keep_checkpoints
        )
        self._inputs: Inputs | None = None
        self._models: Models | None = None
        self._deepspeed: DeepSpeedEngine | None = None

    @property
    def inputs(self) -> Inputs:
        """Prompts and tokenizer, read when first asked for."""
        if self._inputs is None:
            self._inputs = read_inputs(self.config, self.layout)
        return self._inputs

    @property
    def models(self) -> Models:
        """Student and teacher, loaded when first asked for."""
        if self._models is None:
            self._models = self._load(
                self.inputs.tokenizer, self.inputs.train, self.inputs.held_out
            )
        return self._models

    def check(self) -> dict[str, Any]:
        """Do all that `train` does before its first step, and stop.

        Returns:
            What the run would be: prompts, steps, ranks, parameters, the checkpoint to resume.

        Raises:
            UserError: On every rank: whatever would stop `train` before its first step.
        """
        engine = self._engine()
        source = self.resume_point()
        return {
            "prompts": len(self.inputs.train),
            "held_out_prompts": len(self.inputs.held_out or ()),
            "steps": self.total_steps,
            "tp": self.layout.tp,
            "dp": self.layout.dp,
            "device": str(self.layout.device),
            "student_parameters": _parameters(self.models.student.module),
            "teacher_parameters": _parameters(self.models.teacher.model.module),
            "optimizer_tensors": len(engine.slots),
            "resume": None if source is None else str(source[0]),
        }

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        training = self.config.training
        return total_steps(
            len(self.inputs.train),
            training.train_batch_size or 1,
            training.num_train_epochs,
            training.max_steps,
        )

    def train(self) -> TrainResult:
        """Train to the last step, from the newest checkpoint if there is one.

        Returns:
            What came out, equal on all ranks.

        Raises:
            UserError: On every rank: inputs that cannot be used.
            Interrupted: On every rank, after a checkpoint was written, when one of them got
                SIGINT or SIGTERM; the command line ends with 128 + the signal.
        """
        kernels = attention_kernels(self.config.training.attention)
        with self.phases.watch_peers(), kernels:
            engine = self._engine()
            with InterruptFlag() as flag:
                return Run(self, engine, flag).go()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest checkpoint, or the student as it was loaded, on the held-out prompts.

        The training prompts do not have to be there.

        Returns:
            Exact match, reverse KL to the teacher and more by name, equal on all ranks.

        Raises:
            UserError: On every rank: no held-out prompts, or inputs that cannot be used.
        """
        path = self.config.data.eval_path
        if path is None:
            raise ConfigError("data.eval_path is not set: name a file of held-out prompts")
        if self._models is None:
            tokenizer, prompts = read_held_out(self.config, self.layout, path)
            models = self._load(tokenizer, prompts)
        else:
            assert self.inputs.held_out is not None
            models, prompts = self._models, self.inputs.held_out
        self.load_weights(models.student)
        with attention_kernels(self.config.training.attention):
            return evaluate(self.config, self.layout, models, prompts).numbers()

    def rollout(self, path: str | Path, limit: int | None = None) -> int:
        """Write the answers to the training prompts, as `rollout` configures them.

        They are those of the newest checkpoint, or of the student as it was loaded. The teacher
        does not have to be there, and what only training uses is not looked at.

        Args:
            path: The JSONL file to write: prompt, response, tokens, truncated for each prompt.
            limit: Only the first so many prompts.

        Returns:
            How many answers were written.
        """
        answerer: Answerer
        if self._models is None:
            tokenizer, prompts = read_prompts(self.config, self.layout)
            with self.phases.enter("load"):
                answerer = read_answerer(self.config, self.layout, tokenizer)
        else:
            answerer, prompts = self._models, self.inputs.train
        self.load_weights(answerer.student)
        with attention_kernels(self.config.training.attention):
            rows = answer_all(self.config, self.layout, answerer, prompts, limit)
        with self.layout.together():
            if self.layout.is_main:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                Path(path).write_text(text, encoding="utf-8")
        return len(rows)

    def export(self, path: str | Path) -> Path:
        """Write the student of the newest checkpoint as a plain Hugging Face directory.

        Neither prompts nor the teacher have to be there, and what only training uses is not
        looked at.

        Args:
            path: A directory that does not exist yet, or is empty.

        Returns:
            The directory, for `from_pretrained`.
        """
        if self._models is None:
            with self.phases.enter("load"):
                student, tokenizer = read_student(self.config, self.layout)
        else:
            student, tokenizer = self._models.student, self._models.tokenizer
        self.load_weights(student)
        return export_model(student, tokenizer, Path(path))

    def load_weights(self, student: LanguageModel) -> Path | None:
        """Put the newest checkpoint's weights into the student; None if there is no checkpoint."""
        path = self.checkpoints.latest(self.notice)
        if path is None:
            where = self.config.training.save_dir
            self.notice(f"no checkpoint in {where}: using the student as it was loaded")
        else:
            with self.phases.enter("load"):
                self.checkpoints.load(path, student.module, None)
            self.notice(f"using the student of {path}")
        return path

    def forget_models(self) -> None:
        """Load sharded models anew next time: they keep gradients that were not reduced yet."""
        if self.layout.sharded:
            self._models = None

    def notice(self, line: str) -> None:
        """Tell the user, from one rank; ranks under a launcher keep their loggers quiet."""
        if self.layout.is_main:
            complain(line)

    def _load(self, tokenizer: PreTrainedTokenizerBase, *prompts: Prompts | None) -> Models:
        with self.phases.enter("load"):
            return read_models(self.config, self.layout, tokenizer, *prompts)

    def _engine(self) -> Engine:
        if self.config.parallel.engine == "torch":
            module = self.models.student.module
            with self.phases.enter("load"):
                return TorchEngine(module, self.config.training, self.layout, self.total_steps)
        if self._deepspeed is None:
            # once: what it puts into the module cannot be taken out
            from vocabtp.opsd.engine.deepspeed_engine import DeepSpeedEngine, check

            with self.layout.together():
                # before any model is loaded
                check(self.config, self.layout)
            module = self.models.student.module
            with self.phases.enter("load"):
                self._deepspeed = DeepSpeedEngine(
                    module, self.config, self.layout, self.total_steps
                )
            student = replace(self.models.student, forward=self._deepspeed.forward)
            self._models = replace(self.models, student=student)
        return self._deepspeed

    def resume_point(self) -> tuple[Path, Saved] | None:
        """The checkpoint that `train` continues from, found to belong to this run."""
        path = self.checkpoints.latest(self.notice)
        if path is None:
            return None
        if self.config.training.resume == "never":
            raise CheckpointError(
                f"{self.checkpoints.root} holds checkpoints and training.resume is never: "
                "name another training.save_dir, or set training.resume to auto"
            )
        saved = read_saved(path)
        notes = check_resume(saved, self.config, self.inputs, str(path))
        for note in notes:
            self.notice(f"resume from {path}: {note}")
        return path, saved


def _parameters(module: nn.Module) -> int:
    """Weights of the whole model, whatever of them is stored here and how."""
    return sum(
        place.shape.numel() if (place := place_of(p)) else getattr(p, "ds_numel", p.numel())
        for p in module.parameters()
    )
