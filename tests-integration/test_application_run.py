"""A run of the DeepSpeedExamples OPSD application, its files unchanged: the updates of our own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tiny_run import recorded, tiny_run

SHARED = {
    "train_batch_size": 4,
    "micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "seed": 11,
}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.05,
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 2, "overlap_comm": False},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.0},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}},
    "hybrid_engine": {"enabled": True, "max_out_tokens": 64},
}


@pytest.fixture
def files(tmp_path):
    """The application's folder; and a configuration of ours that says the same."""
    own = tiny_run(
        tmp_path / "own",
        training=SHARED
        | {
            "warmup_steps": 2,
            "lr_scheduler": "linear",
            "adam_betas": [0.8, 0.9],
            "max_grad_norm": 0.05,
        },
        distillation={"loss_type": "jsd", "temperature": 2.0, "chunk_size": 7},
        parallel={"shard": "zero2"},
    )
    app = tmp_path / "app"
    (app / "configs").mkdir(parents=True)
    (app / "data").mkdir()
    (app / "data" / "prompts.jsonl").write_text((own.parent / "train.jsonl").read_text())
    models = {role: str(own.parent / role) for role in ("student", "teacher")}
    values = {
        "student": {"model_name_or_path": models["student"], "dtype": "float32"},
        "teacher": {
            "model_name_or_path": models["teacher"],
            "dtype": "float32",
            "offload_to_cpu": False,
        },
        "rollout": {
            "engine": "hybrid_engine",
            "max_prompt_length": 16,
            "max_response_length": 6,
            "temperature": 0,
            "top_p": 1.0,
            "top_k": -1,
            "n_samples_per_prompt": 1,
            "use_graph_capture": False,
        },
        "distillation": {"loss_type": "jsd", "temperature": 2.0, "chunk_size": 128},
        "training": SHARED
        | {
            "learning_rate": 0.01,
            "weight_decay": 0.0,
            "num_train_epochs": 1,
            "save_steps": 10000,
            "logging_steps": 1,
            "save_dir": "./out",
        },
        "data": {"path": "data/prompts.jsonl", "prompt_field": "prompt", "shuffle": True},
        "deepspeed_config": "configs/ds.json",
    }
    (app / "configs" / "ds.json").write_text(json.dumps(DEEPSPEED, indent=4))
    path = app / "configs" / "run.json"
    path.write_text(json.dumps(values, indent=4))
    return path, own


def trained(rank, world, target, paths):
    """Each run; what they answered, lost and ended at."""
    out = []
    for name, (path, *overrides) in paths.items():
        folder = f"training.save_dir={target / name}"
        run = recorded(path, folder, "parallel.device=cpu", *overrides)
        out.append({key: run[key] for key in ("answers", "losses", "weights")})
    return out


def test_the_applications_files_train_as_ours_do(ranks, files, tmp_path):
    app, own = files
    paths = {
        "torch": (app,),
        "own": (own,),
        "deepspeed": (app, "parallel.engine=deepspeed"),
    }
    for theirs, ours, deepspeed in ranks(trained, 2, tmp_path / "runs", paths):
        assert deepspeed["answers"] == ours["answers"]
        assert deepspeed["losses"] == pytest.approx(ours["losses"], rel=1e-5)
        assert theirs["answers"] == ours["answers"]
        assert theirs["losses"] == ours["losses"]
        assert len(set(ours["losses"])) == 3
        for name, weight in ours["weights"].items():
            assert torch.equal(theirs["weights"][name], weight)


@pytest.mark.full
def test_deepspeeds_launcher_starts_the_command(files, tmp_path):
    app, _ = files
    launcher = Path(sys.executable).parent / "deepspeed"
    command = ["--num_accelerators", "2", "--module", "vocabtp.opsd", "train", "configs/run.json"]
    path = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [launcher, *command],
        cwd=app.parents[1],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (app.parents[1] / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [1, 2, 3]
    resolved = yaml.safe_load((app.parents[1] / "out" / "config.yaml").read_text())
    assert resolved["training"]["max_grad_norm"] == 0.05
    assert resolved["parallel"]["shard"] == "zero2"
