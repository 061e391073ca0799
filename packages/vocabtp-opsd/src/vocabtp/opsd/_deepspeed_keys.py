"""The keys of a DeepSpeed configuration: which are read, which are passed on, which are refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# the same setting as a key of ours; they leave the configuration when they have been read
READ = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "hybrid_engine",
        "tensor_parallel",
    }
)

# DeepSpeed's own affair: the engine gets them as they are
PASSED = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "bf16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "csv_monitor",
        "data_types",
        "dataloader_drop_last",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "steps_per_print",
        "tensorboard",
        "timers",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# what the sections that are read may hold; DeepSpeed itself refuses unknown keys in most of them
SECTIONS: dict[str, frozenset[str]] = {
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "optimizer.params": _names(
        "lr betas eps weight_decay torch_adam adam_w_mode bias_correction amsgrad foreach fused "
        "fp32_optimizer_states momentum dampening nesterov"
    ),
    "scheduler": frozenset({"type", "params"}),
    "scheduler.params": _names(
        "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps "
        "warmup_min_ratio cos_min_ratio last_batch_iteration"
    ),
    "data_types": _names("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    "bf16": _names(
        "enabled immediate_grad_update check_grad_overflow "
        "bf16_master_weights_and_grads bf16_optimizer_states"
    ),
    "hybrid_engine": _names(
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph"
    ),
    "tensor_parallel": _names(
        "dtype autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend "
        "tensor_parallel tp injection_policy_tuple partition_config preset_model "
        "keep_module_on_host replace_with_kernel_inject kernel_inject"
    ),
    "zero_optimization": _names(
        "stage contiguous_gradients reduce_scatter reduce_bucket_size "
        "use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm "
        "compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param "
        "offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory "
        "cpu_offload stage3_prefetch_bucket_size prefetch_bucket_size "
        "stage3_param_persistence_threshold param_persistence_threshold "
        "stage3_model_persistence_threshold model_persistence_threshold "
        "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance "
        "max_reuse_distance stage3_gather_16bit_weights_on_model_save "
        "gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
        "module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
        "use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential "
        "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 "
        "round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights "
        "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
        "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
        "enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module "
        "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param"
    ),
}


class Refusal(NamedTuple):
    """A key that may stand there switched off, and why it may not be on."""

    key: str
    is_off: Callable[[Any], bool]
    reason: str


def _empty(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return value in (None, 0, 1)


def _disabled(value: Any) -> bool:
    return not value or (isinstance(value, dict) and not value.get("enabled", False))


def _compile_off(value: Any) -> bool:
    on = ("enabled", "deepcompile", "autoep_non_moe", "passes")
    return not value or (isinstance(value, dict) and not any(value.get(key) for key in on))


def _mean(value: Any) -> bool:
    return value in (None, "mean")


def _true(value: Any) -> bool:
    return value in (None, True)


_DATA = "changes which data a step sees, which this trainer decides itself"
_GONE = "is not supported, nor by current versions of DeepSpeed"
REFUSALS = (
    Refusal("pipeline", _empty, "is pipeline parallelism: split the models with parallel.tp"),
    Refusal(
        "sequence_parallel_size",
        _one,
        "is sequence parallelism: split the models with parallel.tp",
    ),
    Refusal("seq_parallel_communication_data_type", _empty, "belongs to sequence parallelism"),
    Refusal("expert_parallel", _disabled, "is expert parallelism, which is not supported"),
    Refusal(
        "use_data_before_expert_parallelism",
        _empty,
        "is expert parallelism, which is not supported",
    ),
    Refusal(
        "compile",
        _compile_off,
        "compiles the engine, under which the head's rows cannot be selected",
    ),
    Refusal(
        "hybrid_engine.enable_cuda_graph",
        _empty,
        "belongs to the hybrid engine: answers come from this package's own loop",
    ),
    Refusal(
        "hybrid_engine.inference_tp_size",
        _one,
        "belongs to the hybrid engine: answers are made with the ranks of parallel.tp",
    ),
    Refusal(
        "fp16",
        _disabled,
        "is loss scaling for a float16 student, which is not supported: take bf16 "
        "(student.dtype bfloat16)",
    ),
    Refusal(
        "torch_autocast",
        _disabled,
        "is not supported: student.dtype and teacher.dtype are the types of the forward pass",
    ),
    Refusal("amp", _disabled, _GONE),
    Refusal(
        "bf16.bf16_master_weights_and_grads",
        _empty,
        "is not supported: a bfloat16 student keeps float32 weights for its updates",
    ),
    Refusal(
        "bf16.bf16_optimizer_states",
        _empty,
        "is not supported: a bfloat16 student keeps float32 weights for its updates",
    ),
    Refusal(
        "tensor_parallel.tensor_parallel",
        _empty,
        "is not read: the ranks of a model are autotp_size, which is parallel.tp here",
    ),
    Refusal(
        "tensor_parallel.tp",
        _empty,
        "is not read: the ranks of a model are autotp_size, which is parallel.tp here",
    ),
    Refusal("zero_optimization.zenflow", _empty, "applies gradients of earlier steps"),
    Refusal("zero_optimization.mics_shard_size", lambda v: v in (None, -1), _GONE),
    Refusal("zero_optimization.mics_hierarchical_params_gather", _empty, _GONE),
    Refusal("zero_optimization.zeropp_loco_param", _empty, _GONE),
    Refusal("zero_optimization.legacy_stage1", _empty, _GONE),
    *(
        Refusal(f"zero_optimization.zero_quantized_{what}", _empty, "rounds them to a few bits")
        for what in ("weights", "nontrainable_weights", "gradients")
    ),
    Refusal(
        "data_types.buffer_dtype",
        lambda value: value in (None, "fp32", "float32", "float"),
        "rounds the frequencies of rotary embeddings: leave it out",
    ),
    Refusal(
        "gradient_allreduce_op",
        _mean,
        "changes the size of gradients: the loss is scaled by distillation.loss_scale",
    ),
    *(
        Refusal(
            key,
            off,
            "belongs to a mean over the ranks: gradients are summed, each the part of one loss",
        )
        for key, off in (("prescale_gradients", _empty), ("gradient_predivide_factor", _one))
    ),
    Refusal(
        "managed_gradient_accumulation",
        _true,
        "must be true: this trainer steps through the engine",
    ),
    Refusal("autotuning", _disabled, "tries other settings than these: run it by itself"),
    Refusal("data_efficiency", _disabled, _DATA),
    Refusal("curriculum_learning", _disabled, _DATA),
    Refusal("elasticity", _disabled, "changes the batch size with the number of ranks"),
    Refusal("weight_quantization", _empty, "is for inference"),
    Refusal("datastates_ckpt", _empty, "is not supported: checkpoints are this trainer's own"),
    *(
        Refusal(key, _disabled, _GONE)
        for key in (
            "compression_training",
            "eigenvalue",
            "graph_harvesting",
            "nebula",
            "progressive_layer_drop",
            "quantize_training",
            "sparse_attention",
            "sparse_gradients",
        )
    ),
)


def find(values: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None where it is not set."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def problems(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every key that cannot be used, with the end of the line that names it."""
    refused = {item.key for item in REFUSALS}
    for key in values:
        if key not in READ | PASSED | refused:
            yield (
                key,
                "is no key of a DeepSpeed configuration" + _nearest(key, READ | PASSED | refused),
            )
    for section, known in SECTIONS.items():
        held = find(values, section)
        if held is None:
            continue
        if not isinstance(held, dict):
            yield section, f"must be a section with keys, got {held!r}"
            continue
        for key in held:
            if key not in known:
                yield f"{section}.{key}", "is not a key that is known" + _nearest(key, known)
    for item in REFUSALS:
        if not item.is_off(value := find(values, item.key)):
            yield item.key, f"{item.reason} (got {_short(value)})"


def _nearest(key: str, known: frozenset[str] | set[str]) -> str:
    close = difflib.get_close_matches(key, sorted(known), 1)
    return f": did you mean {close[0]}?" if close else ""


def _short(value: Any) -> str:
    return "a section" if isinstance(value, dict) else repr(value)
