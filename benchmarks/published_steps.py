"""The steps of published tables: models by their shapes, and loops that no trainer of today has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchtune_adaptive.library.transformers_step import TransformersStep
from torchtune_adaptive.planner.memory.gpus import Gpu
from torchtune_adaptive.planner.programs import Program

_LOOP = Path(__file__).parent / "published_loop.py"


def _shapes(kind: str, vocabulary: int, *shape: int, tied: bool, **more: Any) -> dict[str, Any]:
    """A ``config.json``, of: hidden size, that of the MLP, layers, heads, heads of keys and values."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return {
        "model_type": kind,
        "architectures": [kind.title().replace("_", "") + "ForCausalLM"],
        "vocab_size": vocabulary,
        **dict(zip(names, shape, strict=True)),
        "tie_word_embeddings": tied,
        **more,
    }


MODELS = {
    "PowerLM-3b": _shapes("granite", 49152, 2304, 9216, 40, 36, 36, tied=True),
    "Meta-Llama-3-8B": _shapes("llama", 128256, 4096, 14336, 32, 32, 8, tied=False),
    "Mistral-7B-v0.1": _shapes("mistral", 32000, 4096, 14336, 32, 32, 8, tied=False),
    "Mistral-7B-v0.3": _shapes("mistral", 32768, 4096, 14336, 32, 32, 8, tied=False),
    "Llama-3.2-1B": _shapes("llama", 128256, 2048, 8192, 16, 32, 8, tied=True, head_dim=64),
    "Llama-3.2-3B": _shapes("llama", 128256, 3072, 8192, 28, 24, 8, tied=True, head_dim=128),
    "deepseek-coder-1.3b": _shapes("llama", 32256, 2048, 5504, 24, 16, 16, tied=False),
    "SmolLM2-135M": _shapes("llama", 49152, 576, 1536, 30, 9, 3, tied=True),
    "SmolLM2-360M": _shapes("llama", 49152, 960, 2560, 32, 15, 5, tied=True),
    "SmolLM2-1.7B": _shapes("llama", 49152, 2048, 8192, 24, 32, 32, tied=True),
    "TinyLlama-1.1B": _shapes("llama", 32000, 2048, 5632, 22, 32, 4, tied=False),
    "llama-160m": _shapes("llama", 32000, 768, 3072, 12, 12, 12, tied=False),
    "Qwen2.5-0.5B": _shapes("qwen2", 151936, 896, 4864, 24, 14, 2, tied=True),
    "Qwen2.5-1.5B": _shapes("qwen2", 151936, 1536, 8960, 28, 12, 2, tied=True),
    "Qwen2.5-7B": _shapes("qwen2", 152064, 3584, 18944, 28, 28, 4, tied=False),
    "Qwen3-0.6B": _shapes("qwen3", 151936, 1024, 3072, 28, 16, 8, tied=True, head_dim=128),
    "Qwen3-30B-A3B": _shapes(
        "qwen3_moe",
        151936,
        2048,
        6144,
        48,
        32,
        4,
        tied=False,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "gpt-oss-20b": _shapes(
        "gpt_oss",
        201088,
        2880,
        2880,
        24,
        64,
        8,
        tied=False,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
    ),
    "gemma-2-2b": _shapes("gemma2", 256000, 2304, 9216, 26, 8, 4, tied=True, head_dim=256),
}
"""The models, with the shapes that their own configs have; what else those have takes no memory."""


def folder_of(model: str, under: Path) -> str:
    """A folder that has the config of a model."""
    folder = under / model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return str(folder)


class OwnLoop(TransformersStep):
    """A loop without a trainer, which ``published_loop.py`` is."""

    def program(self, gpu: Gpu, **others: Any) -> Program:
        folder = self.settings["folder"]
        settings = {name: value for name, value in self.settings.items() if name != "folder"}
        words = str(_LOOP), folder, json.dumps(settings, sort_keys=True)
        return Program(words, gpu, ranks=self.ranks, **others)
