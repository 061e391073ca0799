"""Random Hugging Face causal LMs of a few thousand weights, for tests of the trainer."""

from __future__ import annotations

from typing import Any

import torch

KINDS = ("qwen2", "qwen3", "llama", "gemma2", "gpt2")


def tiny_config(kind: str, *, vocab: int = 37, tied: bool = False, **changes: Any) -> Any:
    """Two layers, hidden 32, 4 heads with 2 key-value heads, unless `changes` says otherwise."""
    from transformers import AutoConfig

    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    else:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
        }
    if kind == "gemma2":
        # soft caps and a window small enough to act on short sequences
        sizes |= {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0}
        sizes |= {"sliding_window": 6, "query_pre_attn_scalar": 8}
    special = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}
    return AutoConfig.for_model(
        kind,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        **(sizes | special | changes),
    )


def tiny_model(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of `tiny_config`, every weight random (norms and biases too), in eval mode."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
