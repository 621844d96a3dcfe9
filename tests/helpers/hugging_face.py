"""Models as the hub describes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def about(
    architecture: str, *shape: int, head_dim: int | None = None, **others: Any
) -> dict[str, Any]:
    """What a config.json says: vocabulary, layers, heads, KV heads, width, width inside, longest rows."""
    names = ("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("hidden_size", "intermediate_size", "max_position_embeddings")
    found = {"architectures": [f"{architecture}ForCausalLM"], "model_type": architecture.lower()}
    found |= others
    found |= dict(zip(names, shape, strict=True))
    return found if head_dim is None else {**found, "head_dim": head_dim}


LLAMA_1B = about(
    *("Llama", 128256, 16, 32, 8, 2048, 8192, 131072),
    head_dim=64,
    tie_word_embeddings=True,
    rope_scaling={"rope_type": "llama3", "factor": 32.0},
)


PUBLISHED = {
    "Qwen2-0.5B": about("Qwen2", 151936, 24, 14, 2, 896, 4864, 131072, tie_word_embeddings=True),
    "Qwen2.5-7B": about("Qwen2", 152064, 28, 28, 4, 3584, 18944, 131072, tie_word_embeddings=False),
    "Qwen3-0.6B": about(
        "Qwen3", 151936, 28, 16, 8, 1024, 3072, 40960, head_dim=128, tie_word_embeddings=True
    ),
}


def written(folder: Path, found: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(found))
    return folder
