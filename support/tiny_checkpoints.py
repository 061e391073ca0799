"""Files of tiny models whose sizes 2 and 3 ranks divide."""

from __future__ import annotations

from types import SimpleNamespace

from safetensors.torch import load_file, save_file

from tiny_models import tiny_model

# heads and sizes that 2 and 3 ranks divide; a vocabulary of 37 that they do not
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 45,
}


def section(path, dtype="float32"):
    return SimpleNamespace(model_name_or_path=str(path), trust_remote_code=False, dtype=dtype)


def save(path, kind="llama", *, pieces=True, **changes):
    """In several files, or in one."""
    sizes = {} if kind == "gpt2" else SIZES
    model = tiny_model(kind, **(sizes | changes))
    model.save_pretrained(path, max_shard_size="12KB" if pieces else "1GB")
    return path


def both_tied_keys(path, change):
    """A tied model whose files hold embedding and head, which differ in the last row."""
    save(path, tied=True, pieces=False)
    state = load_file(path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1] += change
    save_file(state, path / "model.safetensors", {"format": "pt"})
    return state
