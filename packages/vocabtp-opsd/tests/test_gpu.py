"""A run on an accelerator: the trainer's numbers are those of the CPU."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import vocabtp.opsd.rollout as rollout_module
from tiny_models import tiny_model
from tiny_run import recorded, tiny_run
from vocabtp.dist import VocabShard
from vocabtp.opsd.loading import place_model
from vocabtp.opsd.model import LanguageModel
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.rollout import left_padded
from vocabtp.opsd.session import checksum
from vocabtp.opsd.sharding import release, shard_module

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


@pytest.mark.parametrize("beside", ["false", "true"])
def test_bfloat16_and_an_offloaded_teacher_resume_bit_for_bit(tmp_path, beside):
    """From a checkpoint that training waited for, or that was written beside it."""
    path = tiny_run(
        tmp_path,
        student={"dtype": "bfloat16"},
        teacher={"dtype": "bfloat16", "offload_to_cpu": True},
        training={"max_steps": 4, "save_steps": 2},
    )
    here = [f"parallel.device={torch.accelerator.current_accelerator().type}"]
    here.append("training.lr_scheduler=constant")  # a cosine would know of the shorter run
    straight = recorded(path, *here, f"training.save_dir={tmp_path / 'straight'}")
    broken = [*here, f"training.save_dir={tmp_path / 'broken'}", f"training.async_save={beside}"]
    recorded(path, *broken, "training.max_steps=2")
    resumed = recorded(path, *broken)
    assert resumed["losses"] == straight["losses"][2:]
    for name, weight in straight["weights"].items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(resumed["weights"][name], weight)
    for name, value in straight["optimizer"].items():
        assert torch.equal(resumed["optimizer"][name], value)


@pytest.mark.parametrize(("dtype", "rel"), [("float32", 2e-5), ("bfloat16", 5e-3)])
def test_hidden_states_of_an_offloaded_teacher_give_the_losses_of_its_logits(tmp_path, dtype, rel):
    """The head's weights stay on the device while the rest of the teacher is on the host."""
    path = tiny_run(
        tmp_path,
        teacher={"dtype": dtype, "offload_to_cpu": True},
        distillation={"chunk_size": 4},
        training={"micro_batch_size_per_gpu": 2},
    )
    here = f"parallel.device={torch.accelerator.current_accelerator().type}"
    runs = {}
    for name, options in {
        "logits": ["teacher.prefetch_bytes=0"],
        "hidden": ["teacher.payload=hidden"],
        "hidden, one at a time": ["teacher.payload=hidden", "teacher.prefetch_bytes=400"],
    }.items():
        runs[name] = recorded(path, here, f"training.save_dir={tmp_path / name}", *options)
    for run in runs.values():
        assert run["answers"] == runs["logits"]["answers"]
        assert run["losses"] == pytest.approx(runs["logits"]["losses"], rel=rel)


def test_layers_that_run_again_take_less_memory_for_the_same_updates(tmp_path):
    path = tiny_run(
        tmp_path,
        model={
            "max_position_embeddings": 4096,
            "num_hidden_layers": 12,
            "hidden_size": 384,
            "head_dim": 64,
            "attention_dropout": 0.1,
        },
        student={"dtype": "bfloat16"},
        teacher={"dtype": "bfloat16"},
        rollout={"max_prompt_length": 2048},
        training={"micro_batch_size_per_gpu": 4},
    )
    rows = [{"prompt": f"{i % 10}" * 2048} for i in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs, peaks = [], []
    for again in ("false", "true"):
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        runs.append(
            recorded(
                path,
                f"parallel.device={torch.accelerator.current_accelerator().type}",
                f"training.activation_checkpointing={again}",
                f"training.save_dir={tmp_path / again}",
            )
        )
        peaks.append(torch.accelerator.max_memory_allocated())
    # of the first step: gradients of atomic sums may turn a token of a later one
    first = [run["metrics"][0] for run in runs]
    assert first[1]["loss"] == pytest.approx(first[0]["loss"], rel=1e-5)
    assert first[1]["grad_norm"] == pytest.approx(first[0]["grad_norm"], rel=1e-2)
    assert runs[1]["applied"] == [True] * 3
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_take_the_same_updates(tmp_path, dtype):
    path = tiny_run(
        tmp_path,
        model={"num_hidden_layers": 2, "hidden_size": 96, "head_dim": 16, "intermediate_size": 128},
        student={"dtype": dtype},
        teacher={"dtype": dtype},
        training={"micro_batch_size_per_gpu": 2},
    )
    runs = [
        recorded(
            path,
            f"parallel.device={torch.accelerator.current_accelerator().type}",
            f"training.compile={compiled}",
            f"training.save_dir={tmp_path / compiled}",
        )
        for compiled in ("false", "true")
    ]
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    # updates that differ in rounding may turn a greedy token of a later step
    assert runs[1]["losses"][0] == pytest.approx(runs[0]["losses"][0], rel=tolerance)
    assert runs[1]["applied"] == [True] * 3


def end_early(monkeypatch, ends):
    """The answer in row i of a batch ends after `ends[i]` tokens, every other one never does."""
    pick = rollout_module._Picker.pick

    def pick_and_end(self, logits, position):
        tokens = pick(self, logits, position)
        tokens = torch.where(tokens == 2, 3, tokens)
        for row, length in ends.items():
            if position == length - 1:
                tokens[row] = 2
        return tokens

    monkeypatch.setattr(rollout_module._Picker, "pick", pick_and_end)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "math", "eager"])
def test_long_prompts_with_early_ends_have_finite_gradients(
    tmp_path, monkeypatch, attention, dtype
):
    """Prompts of very different lengths, and answers to both kinds that end at once."""
    path = tiny_run(
        tmp_path,
        model={"max_position_embeddings": 4096, "hidden_size": 384, "head_dim": 64},
        student={"dtype": dtype},
        teacher={"dtype": dtype},
        rollout={"max_prompt_length": 2048, "max_response_length": 64, "temperature": 1.0},
        data={"shuffle": False},
        training={
            "attention": attention,
            "micro_batch_size_per_gpu": 4,
            "max_steps": 3,
            "max_skipped_steps": 1,
        },
    )
    # in each batch of four a short and a long prompt of each kind of answer
    rows = [{"prompt": f"{i % 10}" * (2048 if i % 2 else i + 1)} for i in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    end_early(monkeypatch, {0: 1, 1: 4})
    run = recorded(path, f"parallel.device={torch.accelerator.current_accelerator().type}")
    assert [len(answer) for _, _, answer in run["answers"]] == [1, 4, 64, 64] * 3
    assert run["applied"] == [True] * 3


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_long_padding_before_a_prompt_changes_no_logits(kind):
    """Rows of attention without a key are left in the rollout: real tokens must not see them."""
    window = {"sliding_window": 100} if kind == "mistral" else {}
    sizes = {"max_position_embeddings": 4096, "hidden_size": 256, "head_dim": 64}
    module = tiny_model(kind, **sizes, **window).to(torch.bfloat16)
    module.set_attn_implementation("sdpa")
    device = torch.accelerator.current_accelerator()
    model = place_model(module, Layout(device=device), name="m", trainable=False)
    prompts = [[5], [7] * 2048, [1, 2, 3] * 40, [9] * 1500]
    with torch.no_grad():
        tokens, mask = left_padded(prompts, 0, device)
        together, _ = model.next_logits(tokens, mask)
        alone = [model.next_logits(*left_padded([prompt], 0, device))[0] for prompt in prompts]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0.05, atol=0.05)


@pytest.fixture
def one_rank(tmp_path):
    """A mesh of this process's device alone."""
    device = torch.accelerator.current_accelerator()
    backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    store = dist.FileStore(str(tmp_path / "store"), 1)
    device = torch.device(device.type, torch.accelerator.current_device_index())
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
    yield init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_a_sharded_teacher_on_the_host_takes_a_layer_at_a_time(one_rank):
    device = torch.device(one_rank.device_type)
    tokens = torch.arange(30, device=device).view(2, 15)
    batch = (tokens, torch.ones_like(tokens), (torch.arange(15, device=device) > 9).expand(2, 15))
    found, used = [], []
    for offload in (False, True):
        module = tiny_model("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
        whole = sum(p.nbytes for p in module.parameters())
        module.requires_grad_(False)
        shard_module(module, one_rank, free=True, name="t", offload=offload)
        model = LanguageModel(
            module=module, shard=VocabShard(0, 37, 37, None), layout=Layout(device=device), name="t"
        )
        places = {p.to_local().device.type for p in module.parameters()}
        assert places == {"cpu" if offload else device.type}
        assert checksum(model)
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        with torch.no_grad():
            found.append(model.response_logits(*batch))
        release(module)
        used.append(torch.accelerator.max_memory_allocated() - before)
        del module, model
        torch.accelerator.empty_cache()
    assert torch.equal(*found)
    # two layers of six, gathered and what they are gathered from, and activations
    assert used[1] < 0.9 * whole
