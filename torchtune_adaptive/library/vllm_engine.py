"""The memory that vLLM takes on the GPUs of a training, as arithmetic.

Read from TRL 1.16, and from what vLLM reports of itself; nothing of it was measured here. vLLM takes a share
of the whole card, by its own setting, for its weights, its activations and its cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
ASLEEP = GIB
"""Assumption: what is left of an engine that sleeps, as CUDA graphs and the buffers of libraries. Reports of
vLLM say 0.3 GiB (19.51 of 19.78 GiB freed, https://github.com/vllm-project/vllm/issues/17117), and more with
tensor parallelism (https://github.com/NVIDIA-NeMo/RL/issues/223)."""
_BYTES = 2
"""Bytes of a number in its weights and in its cache: vLLM takes 16 bits, whatever the checkpoint has."""


@dataclass(frozen=True)
class VllmEngine:
    """vLLM, as TRL starts it."""

    total: int
    """Bytes of a card in all."""
    utilization: float
    """``vllm_gpu_memory_utilization``."""
    here: bool
    """Whether it runs on the GPUs of the training (*colocated*)."""
    sleeps: bool
    """Whether it sleeps while it does not generate, at level 2: its weights and its cache are given back."""

    @property
    def share(self) -> int:
        """Bytes that it takes while it generates."""
        return int(self.total * self.utilization) if self.here else 0

    @property
    def share_in_training(self) -> int:
        """Bytes that it takes the rest of the time."""
        return min(ASLEEP, self.share) if self.sleeps else self.share

    def most(self, usable: int, generating: int, others: int) -> float:
        """The highest ``vllm_gpu_memory_utilization``, of two digits, that leaves room for a trainer that
        holds so many bytes while vLLM generates, and at most so many otherwise; 0 if none does."""
        left = usable - generating if self.sleeps else usable - max(generating, others)
        if self.sleeps and others + self.share_in_training > usable:
            return 0.0
        return max(0, min(99, 100 * left // self.total)) / 100


@dataclass(frozen=True)
class EngineNeeds:
    """What vLLM needs to start: less, and it ends with an error."""

    weights: int
    """Bytes of its weights on one GPU."""
    cache: int | None
    """Bytes of its cache for one sequence as long as it may get; None where the model's cache is of another
    kind than keys and values of each token."""
    tokens: int
    """The tokens of that sequence."""

    @property
    def least(self) -> int:
        return self.weights + (self.cache or 0)

    def sequences(self, share: int, tokens: int) -> int | None:
        """How many sequences of so many tokens the cache has at most room for in a share of the card, if that
        is known: activations take some of it."""
        if not self.cache:
            return None
        return max(0, (share - self.weights) * self.tokens // (self.cache * tokens))


def engine_needs(
    config: Mapping[str, Any], numbers: int, gpus: int, length: int | None
) -> EngineNeeds:
    """What vLLM needs for a model.

    Args:
        config: of the model, its ``config.json``.
        numbers: those in its weights.
        gpus: the number that share its layers (tensor parallelism).
        length: the tokens of the longest sequence (``vllm_max_model_length``), if it is set.
    """
    tokens = length or config.get("max_position_embeddings") or 0
    each = _cache_of_a_token(config)
    cache = None if each is None or not tokens else each * tokens // gpus
    return EngineNeeds(numbers * _BYTES // gpus, cache, tokens)


def _cache_of_a_token(config: Mapping[str, Any]) -> int | None:
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    kinds = set(config.get("layer_types") or ["full_attention"])
    others = ("kv_lora_rank", "mamba_d_state", "linear_num_key_heads")
    if not heads or not layers or kinds != {"full_attention"} or any(map(config.get, others)):
        return None
    width = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * layers * (config.get("num_key_value_heads") or heads) * width * _BYTES)
