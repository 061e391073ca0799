"""A run on an accelerator: the trainer's numbers are those of the CPU."""

import json

import pytest
import torch

from tiny_run import recorded, tiny_run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_equals_the_one_on_the_cpu(tmp_path, loss, temperature):
    path = tiny_run(
        tmp_path,
        held_out=4,
        rollout={"temperature": temperature},
        distillation={"loss_type": loss, "chunk_size": 4},
        training={"micro_batch_size_per_gpu": 2, "max_steps": 3},
    )
    runs = {}
    for device in ("cpu", torch.accelerator.current_accelerator().type):
        out = tmp_path / device
        runs[device] = recorded(path, f"parallel.device={device}", f"training.save_dir={out}")
    cpu, gpu = runs.values()
    assert all(weight.device.type != "cpu" for weight in gpu["weights"].values())
    assert gpu["answers"] == cpu["answers"]
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=2e-5, abs=1e-6)
    assert gpu["applied"] == [True] * 3
    assert all(all(changed.values()) for changed in gpu["changed"])
    for name, weight in cpu["weights"].items():
        torch.testing.assert_close(gpu["weights"][name].cpu(), weight, rtol=1e-3, atol=1e-4)
    for name, weight in cpu["teacher"].items():
        assert torch.equal(gpu["teacher"][name].cpu(), weight)


def test_bfloat16_and_an_offloaded_teacher_resume_bit_for_bit(tmp_path):
    path = tiny_run(
        tmp_path,
        student={"dtype": "bfloat16"},
        teacher={"dtype": "bfloat16", "offload_to_cpu": True},
        training={"max_steps": 4, "save_steps": 2},
    )
    here = [f"parallel.device={torch.accelerator.current_accelerator().type}"]
    here.append("training.lr_scheduler=constant")  # a cosine would know of the shorter run
    straight = recorded(path, *here, f"training.save_dir={tmp_path / 'straight'}")
    broken = [*here, f"training.save_dir={tmp_path / 'broken'}"]
    recorded(path, *broken, "training.max_steps=2")
    resumed = recorded(path, *broken)
    assert resumed["losses"] == straight["losses"][2:]
    for name, weight in straight["weights"].items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(resumed["weights"][name], weight)
    for name, value in straight["optimizer"].items():
        assert torch.equal(resumed["optimizer"][name], value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "math", "eager"])
def test_long_prompts_with_early_ends_have_finite_gradients(tmp_path, attention, dtype):
    """Left padding of very different widths beside answers that end at once."""
    path = tiny_run(
        tmp_path,
        model={"max_position_embeddings": 4096, "hidden_size": 384, "head_dim": 64},
        student={"dtype": dtype},
        teacher={"dtype": dtype},
        rollout={"max_prompt_length": 2048, "max_response_length": 64, "temperature": 1.0},
        training={
            "attention": attention,
            "micro_batch_size_per_gpu": 4,
            "max_steps": 3,
            "max_skipped_steps": 1,
        },
    )
    rows = [{"prompt": f"{i}" * (2048 if i % 2 else i + 1)} for i in range(10)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = recorded(path, f"parallel.device={torch.accelerator.current_accelerator().type}")
    assert run["applied"] == [True] * 3
    lengths = [len(answer) for _, _, answer in run["answers"]]
    # the batch is what it claims to be
    assert min(lengths) < 16 < 32 < max(lengths)
