"""DeepSpeed's file of a run that is trained with ZeRO-2, and what a run has to say beside it."""

ZERO2 = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 25,
    "gradient_clipping": 0.7,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "offload_optimizer": {"device": "none"},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-6, "betas": [0.9, 0.95], "eps": "1e-8", "weight_decay": 0.01},
    },
    "hybrid_engine": {"enabled": True, "max_out_tokens": 256, "inference_tp_size": 1},
}
RUN = {
    "student": {"model_name_or_path": "o/s"},
    "teacher": {"model_name_or_path": "o/t"},
    "data": {"path": "p.jsonl"},
}
