"""What each engine reads of DeepSpeed's JSON, and what would harm a run with DeepSpeed's own."""

import pytest

from vocabtp.opsd.config import load_config
from vocabtp.opsd.engine.deepspeed_json import complete
from vocabtp.opsd.parallel import Layout


def test_stages_of_the_deepspeed_engine(load_theirs, refusal_of_theirs, tmp_path):
    ours = {"parallel": {"engine": "deepspeed"}, "teacher": {"offload_to_cpu": True}}
    config = load_theirs({"zero_optimization": {"stage": 1}}, ours)
    assert config.parallel.shard == "zero2"
    assert config.deepspeed_config["zero_optimization"] == {"stage": 1}
    assert refusal_of_theirs({"zero_optimization": {"stage": 3}}, ours).startswith(
        f"{tmp_path}/ds.json:3: zero_optimization.stage is 3, but parallel.engine is 'deepspeed'"
    )
    away = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert refusal_of_theirs(away, ours).startswith(
        f"{tmp_path}/ds.json:4: zero_optimization.offload_optimizer is not supported"
    )
    assert load_theirs(away).deepspeed_config["zero_optimization"] == away["zero_optimization"]


def engine(dtype="bfloat16", stage=0, **training):
    """Our side of a run with DeepSpeed's engine."""
    return {
        "student": {"dtype": dtype},
        "parallel": {"engine": "deepspeed", "shard": "zero2" if stage else "none"},
        "training": training,
    }


NORM = {"zero_optimization": {"compute_grad_norm": False}}
UNTESTED = {"zero_allow_untested_optimizer": False}
ACCUMULATION = "data_types.grad_accum_dtype"


def accumulating(dtype, stage=None):
    zero = {} if stage is None else {"zero_optimization": {"stage": stage}}
    return {"data_types": {"grad_accum_dtype": dtype}} | zero


@pytest.mark.parametrize(
    ("theirs", "ours", "line", "message"),
    [
        (NORM, engine(), 3, "zero_optimization.compute_grad_norm is false, which DeepSpeed has"),
        (
            UNTESTED,
            engine(stage=2, optimizer="sgd"),
            2,
            "zero_allow_untested_optimizer is false, with which DeepSpeed refuses "
            "training.optimizer sgd at stage 2: leave",
        ),
        (
            {"communication_data_type": "FP16"},
            engine(),
            2,
            "communication_data_type must be fp32 or bf16, got 'FP16': there is no loss scale",
        ),
        (
            {"communication_data_type": "float32"},
            engine("float32"),
            2,
            "communication_data_type must be fp32 or bf16, got 'float32'",
        ),
        (accumulating("fp32"), engine(), 3, f"{ACCUMULATION} must be bfloat16 with a bfloat16 st"),
        (accumulating("fp32", 1), engine(stage=1), 3, f"{ACCUMULATION} must be bfloat16 with a"),
        (accumulating("fp16"), engine(stage=2), 3, f"{ACCUMULATION} must be bfloat16 or float32"),
        (accumulating(3), engine(stage=2), 3, f"{ACCUMULATION} must be bfloat16 or float32"),
        (accumulating("bf16"), engine("float32"), 3, f"{ACCUMULATION} must be float32 with a fl"),
    ],
)
def test_what_would_end_or_lose_gradients_with_deepspeeds_engine(
    load_theirs, refusal_of_theirs, tmp_path, theirs, ours, line, message
):
    assert refusal_of_theirs(theirs, ours).startswith(f"{tmp_path}/ds.json:{line}: {message}")
    # nothing of it is read with the other one
    torch_engine = ours | {"parallel": {"shard": ours["parallel"]["shard"]}}
    load_theirs(theirs, torch_engine)


@pytest.mark.parametrize("off", [False, 0, 0.0, "no", "off", "False", "f", "N", "0"])
def test_a_switch_is_off_however_deepspeed_lets_it_be_written(
    load_theirs, refusal_of_theirs, warned, off
):
    """`bool("no")` is True: it read as on, or passed by a check for false."""
    norm = {"zero_optimization": {"compute_grad_norm": off}}
    assert "compute_grad_norm is false" in refusal_of_theirs(norm, engine())
    half = {"bf16": {"enabled": off}}
    assert load_theirs(half, {"student": {"dtype": None}}).student.dtype == "float32"
    assert "bf16.enabled is false, but student.dtype is " in refusal_of_theirs(
        half, {"student": {"dtype": "bfloat16"}}
    )
    head = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": off}}
    assert "but distillation.loss_backend is 'vocab_parallel'" in refusal_of_theirs(head)
    # off, they may stay
    zero = {f"zero_quantized_{what}": off for what in ("weights", "gradients")}
    zero |= {"stage": 2, "cpu_offload": off}
    rest = {"bf16": {"bf16_optimizer_states": off}, "hybrid_engine": {"enabled": off}}
    warned.clear()
    load_theirs(rest | {"zero_optimization": zero, "fp16": {"enabled": off}}, engine(stage=2))
    assert "hybrid_engine" not in warned.text


@pytest.mark.parametrize("on", [True, 1, "yes", "on", "TRUE", "t", "1"])
def test_a_switch_is_on_however_deepspeed_lets_it_be_written(load_theirs, refusal_of_theirs, on):
    both = {"zero_optimization": {"compute_grad_norm": on}, "bf16": {"enabled": on}}
    assert load_theirs(both, engine()).student.dtype == "bfloat16"
    assert "zero_optimization.legacy_stage1 is not supp" in refusal_of_theirs(
        {"zero_optimization": {"legacy_stage1": on}}
    )


@pytest.mark.parametrize(
    ("theirs", "ours", "notice"),
    [
        (
            {"communication_data_type": "bf16"},
            engine("float32"),
            "communication_data_type 'bf16': gradients are rounded to bfloat16 and summed so over",
        ),
        (
            accumulating("bfloat16"),
            engine(stage=2),
            f"{ACCUMULATION} 'bfloat16': gradients of micro-batches add up in bfloat16; left out",
        ),
        ({"communication_data_type": "fp32"}, engine(), ""),
        (accumulating("fp32"), engine(stage=2), ""),
        (accumulating("torch.float32"), engine("float32"), ""),
        (accumulating("bfloat16", 1), engine(stage=1), ""),
        (accumulating("bf16"), engine(), ""),
        (NORM, engine(stage=2), ""),
        (UNTESTED, engine(stage=2), ""),
        (UNTESTED, engine(optimizer="sgd"), ""),
    ],
)
def test_what_rounds_gradients_is_told_and_what_does_not_is_passed_on(
    load_theirs, warned, theirs, ours, notice
):
    config = load_theirs(theirs | {"gradient_clipping": 1.0}, ours)
    for key, value in theirs.items():
        held = config.deepspeed_config[key]
        assert held == (value if not isinstance(value, dict) else held | value)
    assert [line.startswith(notice) for line in warned.messages] == [True] * bool(notice)
    complete(config.for_world(1), Layout())


def test_autotp_cuts_where_its_size_is_given(load_theirs, refusal_of_theirs, warned, tmp_path):
    sized = {"tensor_parallel": {"autotp_size": 2}}
    deepspeed = {"parallel": {"engine": "deepspeed"}}
    assert load_theirs(sized).parallel.tp_by == "plan"
    config = load_theirs(sized, deepspeed)
    assert (config.parallel.tp, config.parallel.tp_by) == (2, "autotp")
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again) == config
    assert load_config(again, ["parallel.tp_by=plan"]).parallel.tp_by == "plan"
    # ours alone, and ours against theirs
    assert load_theirs({}, {"parallel": {"engine": "deepspeed", "tp": 2}}).parallel.tp_by == "plan"
    ours = {"parallel": {"engine": "deepspeed", "tp_by": "plan"}}
    assert load_theirs(sized, ours).parallel.tp_by == "plan"
    assert load_theirs({"tensor_parallel": {"autotp_size": 1}}, deepspeed).parallel.tp_by == "plan"
    torch_engine = refusal_of_theirs(sized, {"parallel": {"tp_by": "autotp"}})
    assert "parallel.tp_by is autotp, which is for parallel.engine deepspeed" in torch_engine
    whole = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": False}}
    both = deepspeed | {"distillation": {"loss_backend": "dense"}}
    assert "distillation.loss_backend is dense, which keeps whole heads, but" in refusal_of_theirs(
        whole, both
    )
    assert load_theirs(whole, both | ours).parallel.tp_by == "plan"


def test_autotps_own_plans(load_theirs, refusal_of_theirs, warned):
    theirs = {"tensor_parallel": {"autotp_size": 2, "preset_model": "qwen2", "dtype": "bf16"}}
    assert load_theirs(theirs).deepspeed_config["tensor_parallel"] == {
        "autotp_size": 2,
        "vocab_parallel_lm_head": True,
    }
    assert (
        "tensor_parallel.preset_model, tensor_parallel.dtype: not used, models are cut by the plan"
        in warned.text
    )
    ours = {"parallel": {"engine": "deepspeed"}}
    assert "tensor_parallel.preset_model is not supported: AutoTP cuts by" in refusal_of_theirs(
        theirs, ours
    )
    load_theirs(theirs, {"parallel": {"engine": "deepspeed", "tp_by": "plan"}})


def test_the_torch_engine_names_what_it_does_not_read(load_theirs, warned):
    load_theirs({"zero_optimization": {"stage": 2, "overlap_comm": True}, "steps_per_print": 5})
    assert "parallel.engine is torch" in warned.text
    assert (
        "not for zero_optimization.overlap_comm, steps_per_print; parallel.engine=deep"
        in warned.text
    )
