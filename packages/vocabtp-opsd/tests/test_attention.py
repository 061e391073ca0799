"""`training.attention`: which kernels really run."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_run import recorded, tiny_run
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import ConfigError, ModelError
from vocabtp.opsd.trainer import Trainer


class _Operators(TorchDispatchMode):
    """The names of all operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_the_kernels_are_the_ones_that_were_asked_for(tmp_path):
    path = tiny_run(tmp_path, training={"max_steps": 1})
    runs, fused = {}, {}
    for attention in ("sdpa", "math", "eager"):
        save = f"training.save_dir={tmp_path / attention}"
        with _Operators() as ran:
            runs[attention] = recorded(path, f"training.attention={attention}", save)
        fused[attention] = any("flash_attention" in name for name in ran.names)
    assert fused == {"sdpa": True, "math": False, "eager": False}
    assert torch.backends.cuda.flash_sdp_enabled()
    for other in ("math", "eager"):
        assert runs[other]["losses"] == pytest.approx(runs["sdpa"]["losses"], rel=1e-5)


def test_evaluation_and_rollout_take_them_too(tmp_path):
    path = tiny_run(tmp_path, held_out=1, training={"attention": "math"})
    trainer = Trainer(load_config(path))
    with _Operators() as ran:
        trainer.evaluate()
        trainer.rollout(tmp_path / "answers.jsonl", 1)
    assert not any("flash_attention" in name for name in ran.names)


@pytest.mark.parametrize("override", ["student.dtype=bfloat16", "parallel.device=auto"])
def test_flash_needs_a_gpu_and_half_precision(tmp_path, override):
    path = tiny_run(tmp_path)
    with pytest.raises(ConfigError, match=r"training\.attention is flash, which needs a GPU and"):
        load_config(path, ["training.attention=flash", override])


def test_flash_without_its_package_is_one_line(tmp_path):
    path = tiny_run(tmp_path, student={"dtype": "bfloat16"}, teacher={"dtype": "bfloat16"})
    config = load_config(path, ["training.attention=flash", "parallel.device=auto"])
    with pytest.raises(ModelError, match="flash") as caught:
        Trainer(config).check()
    assert "\n" not in str(caught.value)
