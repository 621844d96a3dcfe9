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
    "Llama-2-7b": (about("Llama", 32000, 32, 32, 32, 4096, 11008, 4096), 6_738_415_616),
    "Llama-3.1-8B": (
        about(
            *("Llama", 128256, 32, 32, 8, 4096, 14336, 131072),
            rope_scaling={"rope_type": "llama3"},
        ),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (LLAMA_1B, 1_235_814_400),
    "Mistral-7B-v0.1": (about("Mistral", 32000, 32, 32, 8, 4096, 14336, 32768), 7_241_732_096),
    "Qwen2-0.5B": (
        about("Qwen2", 151936, 24, 14, 2, 896, 4864, 131072, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen2.5-7B": (
        about("Qwen2", 152064, 28, 28, 4, 3584, 18944, 131072, tie_word_embeddings=False),
        7_615_616_512,
    ),
    "gemma-2b": (
        about("Gemma", 256000, 18, 8, 1, 2048, 16384, 8192, head_dim=256),
        2_506_172_416,
    ),
    "gemma-7b": (
        about("Gemma", 256000, 28, 16, 16, 3072, 24576, 8192, head_dim=256),
        8_537_680_896,
    ),
    "gemma-2-2b": (
        about("Gemma2", 256000, 26, 8, 4, 2304, 9216, 8192, head_dim=256),
        2_614_341_888,
    ),
    "Mistral-Nemo-12B": (
        about("Mistral", 131072, 40, 32, 8, 5120, 14336, 131072, head_dim=128),
        12_247_782_400,
    ),
    "Qwen3-0.6B": (
        about(
            *("Qwen3", 151936, 28, 16, 8, 1024, 3072, 40960),
            head_dim=128,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
    "Qwen3-8B": (
        about("Qwen3", 151936, 36, 32, 8, 4096, 12288, 40960, head_dim=128),
        8_190_735_360,
    ),
    "phi-4": (about("Phi3", 100352, 40, 40, 10, 5120, 17920, 16384), 14_659_507_200),
    "Phi-3-mini-4k": (about("Phi3", 32064, 32, 32, 32, 3072, 8192, 4096), 3_821_079_552),
}


def written(folder: Path, found: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(found))
    return folder
