"""Runs in which one rank alone meets a fault, whichever engine trains: called on all ranks."""

import math

from tiny_run import recorded


def bad_numbers(rank, world, path, faults, overrides):
    """Train; in the steps of `faults` the last rank alone meets a number that is not finite.

    `faults` says by step which: "row" is NaN in the second row of the step's second micro-batch,
    anything else the name of a parameter, whose gradient is infinite in all of the step's parts.

    Returns:
        Whether each step was applied, why not, and whether any weight moved in it; or the step
        that ended the run and what was said.
    """
    import vocabtp.opsd.run as run_module
    from vocabtp.opsd.errors import NotFiniteError
    from vocabtp.opsd.model import LanguageModel

    forward, run = LanguageModel.response_logits, run_module.Stepper.run
    seen = {"step": -1, "passes": 0}
    mine = faults if rank == world - 1 else {}

    def stepping(self, step, *stopping):
        seen.update(step=step, passes=0)
        name = mine.get(step, "row")
        if name == "row":
            return run(self, step, *stopping)
        parameter = self.models.student.module.get_parameter(name)
        hook = parameter.register_hook(lambda grad: grad.abs() + math.inf)
        try:
            return run(self, step, *stopping)
        finally:
            hook.remove()

    def logits(self, *args):
        out = forward(self, *args)
        if self.module.training:
            seen["passes"] += 1
            if mine.get(seen["step"]) == "row" and seen["passes"] == 2:
                out = out.clone()
                out[1] = math.nan
        return out

    LanguageModel.response_logits, run_module.Stepper.run = logits, stepping
    try:
        found = recorded(path, *overrides)
        reasons = [step.get("skipped_because") for step in found["metrics"]]
        return found["applied"], reasons, [any(step.values()) for step in found["changed"]]
    except NotFiniteError as error:
        return seen["step"], str(error)
    finally:
        LanguageModel.response_logits, run_module.Stepper.run = forward, run


def full_disk(rank, world, path, what, overrides):
    """Train on a disk that is full when the second checkpoint is written.

    What each rank says when rank 1 cannot write tensors (`tensors`), rank 0 not the last file
    (`mark`), or not the metrics of the second step (`metrics`).
    """
    from vocabtp.opsd import checkpoint, checkpoint_files
    from vocabtp.opsd.errors import UserError
    from vocabtp.opsd.metrics import MetricsWriter

    owner, name = {
        "tensors": (checkpoint.FileSystemWriter, "write_data"),
        "mark": (checkpoint_files, "_write"),
        "metrics": (MetricsWriter, "write"),
    }[what]
    write, calls = getattr(owner, name), []

    def full(*args, **options):
        calls.append(1)
        # two files of each checkpoint are ours
        if len(calls) == (4 if what == "mark" else 2) and rank == (what == "tensors"):
            raise OSError(28, "No space left on device")
        return write(*args, **options)

    setattr(owner, name, full)
    try:
        recorded(path, *overrides)
        return None
    except UserError as error:
        return type(error).__name__, str(error)
    finally:
        setattr(owner, name, write)
