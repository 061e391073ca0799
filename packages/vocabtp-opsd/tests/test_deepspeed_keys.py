"""Keys of DeepSpeed's JSON: what cannot be used is refused by its name and line."""

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed_files import RUN
from vocabtp.opsd._deepspeed_keys import PASSED, READ, REFUSALS
from vocabtp.opsd._deepspeed_keys import SECTIONS as KNOWN
from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import ConfigError


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"deepspeed_config": "none.json"}, sort_keys=False))
    with pytest.raises(ConfigError, match=r"run.yaml:7: deepspeed_config: no file 'none\.json'"):
        load_config(path)


@pytest.mark.parametrize(
    ("theirs", "key"),
    [
        ({"pipeline": {"stages": 2}}, "pipeline"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"compile": {"deepcompile": True}}, "compile"),
        ({"compile": {"deepcompile": False, "passes": ["autosp"]}}, "compile"),
        ({"hybrid_engine": {"enable_cuda_graph": True}}, "hybrid_engine.enable_cuda_graph"),
        ({"hybrid_engine": {"inference_tp_size": 2}}, "hybrid_engine.inference_tp_size"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "tensor_parallel.tp"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        ({"sparse_gradients": True}, "sparse_gradients"),
        ({"data_types": {"buffer_dtype": "bf16"}}, "data_types.buffer_dtype"),
        ({"data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype"),
        ({"zero_optimization": {"legacy_stage1": True}}, "zero_optimization.legacy_stage1"),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients",
        ),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type"),
        ({"optimizer": {"params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "optimizer.params.adam_w_mode"),
        ({"optimizer": {"params": {"momentum": 0.9}}}, "optimizer.params.momentum"),
        ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm"),
        ({"scheduler": {"type": "OneCycle", "params": {"warmup_num_steps": 1}}}, "scheduler.type"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
        (
            {"scheduler": {"params": {"warmup_min_lr": 1e-7}}},
            "scheduler.params.warmup_min_lr",
        ),
        ({"scheduler": {"params": {"warmup_type": "log"}}}, "scheduler.params.warmup_type"),
        (
            {"scheduler": {"params": {"last_batch_iteration": 100}}},
            "scheduler.params.last_batch_iteration",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": True}, "zero_optimization"),
        ({"optimizer": {"params": [1]}}, "optimizer.params"),
    ],
)
def test_what_cannot_be_used_is_refused_by_key(refusal_of_theirs, theirs, key, tmp_path):
    # one key a line, of which the outer two are told apart
    line = 2 if "." not in key else 3
    text = refusal_of_theirs(theirs)
    assert text.startswith(f"{tmp_path}/ds.json:{line}: {key} ")


def test_what_is_switched_off_is_left_out(load_theirs):
    off = {
        "pipeline": {},
        "sequence_parallel_size": 1,
        "compile": {"deepcompile": False},
        "fp16": {"enabled": False, "initial_scale_power": 16},
        "amp": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "hybrid_engine": {"enabled": False},
        "flops_profiler": {"enabled": False},
        "gradient_allreduce_op": "mean",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "managed_gradient_accumulation": True,
        "sparse_gradients": False,
        "zero_optimization": {"mics_shard_size": -1, "zero_quantized_weights": False},
        "data_types": {"buffer_dtype": "fp32"},
    }
    assert load_theirs(off).deepspeed_config == {
        "flops_profiler": {"enabled": False},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0},
    }


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping is no key of a DeepSpeed configuration: did"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge is not a key that is known"),
        ({"optimizer": {"params": {"learning_rate": 1}}}, "optimizer.params.learning_rate is not"),
        ({"bf16": {"enable": True}}, "bf16.enable is not a key that is known: did you mean ena"),
    ],
)
def test_unknown_keys_are_refused(refusal_of_theirs, theirs, message):
    assert message in refusal_of_theirs(theirs)


_KEYS = sorted(READ | PASSED | {item.key for item in REFUSALS if "." not in item.key})
_INNER = sorted({key for known in KNOWN.values() for key in known})
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 5),
    st.floats(),
    st.sampled_from(["auto", "AdamW", "WarmupLR", "1e-3", ""]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.one_of(st.sampled_from(_INNER), st.integers(0, 1)), inner, max_size=3),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(theirs=st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=3))
def test_whatever_stands_there_is_read_or_told_in_one_line(theirs, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(RUN | {"deepspeed_config": theirs}, sort_keys=False))
    told = ""
    try:
        config = load_config(path)
        path.write_text(config.dump())
        assert load_config(path) == config
    except ConfigError as error:
        told = str(error)
    assert "\n" not in told


def test_a_key_that_is_a_number(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN) + "deepspeed_config: {bf16: {1: 2}}\n")
    with pytest.raises(ConfigError, match=r"deepspeed_config\.bf16\.1 is not a key that is known"):
        load_config(path)


def test_a_mapping_that_holds_itself(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN) + "deepspeed_config: &a\n  aio: *a\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:7: deepspeed_config is nested too deeply"):
        load_config(path)
