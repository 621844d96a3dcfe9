"""The steps of published tables: models by their shapes, and what ran there that no trainer of today does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from torchtune_adaptive.library.step_choices import PLAIN
from torchtune_adaptive.library.transformers_model import Batch, StepModel, prepared_of
from torchtune_adaptive.library.transformers_step import TransformersStep
from torchtune_adaptive.planner.trace import fake_device


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


class _Held(torch.autograd.Function):
    """Holds tensors until backward has come to where the model began."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        ctx.held = held
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.held.clear()
        return grad, None


def _with_all_heads(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by a kernel that wants as many heads of keys and values as of queries."""
    groups = query.size(-3) // key.size(-3)
    if groups > 1:
        key, value = (one.repeat_interleave(groups, dim=-3) for one in (key, value))
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return found.transpose(1, 2).contiguous(), None


@dataclass(frozen=True, kw_only=True)
class OwnLoop(TransformersStep):
    """A loop without a trainer."""

    trainer: str = PLAIN
    bf16: bool | None = False
    max_grad_norm: float = 0.0
    optim: str = "adamw_torch"
    attention: str = "sdpa"
    """``eager``, ``sdpa`` with a kernel that wants all heads, or ``grouped``, as plans have it."""
    keeps_output: str = "backward"
    """Until when ``out = model(...)`` keeps all logits: the end of ``backward``, or of the ``step``; empty if
    the loop keeps only the loss."""
    waits_for_each_step: bool = False
    """Whether the host waits for the device where a step ends, as loops do that time their steps."""
    half_adapters: bool = False
    """Whether adapters are cast to bfloat16."""

    @property
    def adapters_are_half(self) -> bool:
        return self.half_adapters or super().adapters_are_half

    def model(self) -> StepModel:
        return _ModelOfOwnLoop(self)


_KEPT: list[torch.Tensor] = []
"""The logits that a loop keeps until its step ends."""


class _ModelOfOwnLoop(StepModel):
    def optimizer(self, parameters: Iterator[nn.Parameter]) -> Optimizer:
        made = super().optimizer(parameters)
        made.register_step_post_hook(lambda *_: self._end_step())
        return made

    def _end_step(self) -> None:
        _KEPT.clear()
        if self.step.waits_for_each_step:
            fake_device.current_stream().synchronize()

    def made(self) -> Any:
        from transformers import AttentionInterface, AttentionMaskInterface

        if self.step.attention == "grouped":
            return super().made()
        model = self.from_config()
        name = "eager"
        if self.step.attention == "sdpa":
            name = "all_heads"
            AttentionInterface.register(name, _with_all_heads)
            AttentionMaskInterface.register(name, self.mask)
        model.set_attn_implementation(name)
        return model

    def forward(self, built: nn.Module, batch: Batch) -> torch.Tensor:
        model: Any = prepared_of(built).model
        if self.step.keeps_output != "backward":
            with self.mixed_precision():
                found = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False)
            if self.step.keeps_output:
                _KEPT.append(found.logits.detach())
            own_loss: torch.Tensor = found.loss
            return own_loss
        held: list[torch.Tensor] = []

        def hold(_: nn.Module, __: Any, output: torch.Tensor) -> Any:
            return _Held.apply(output, held)

        hook = model.get_input_embeddings().register_forward_hook(hold)
        with self.mixed_precision():
            found = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False)
        hook.remove()
        held.append(found.logits.detach())
        loss: torch.Tensor = found.loss
        return loss


@dataclass(frozen=True, kw_only=True)
class CastByTrl(TransformersStep):
    """QLoRA by SFTTrainer of 2024, which casts adapters, embedding and head to bfloat16, but no norms."""

    trainer: str = PLAIN

    @property
    def adapters_are_half(self) -> bool:
        return True

    def model(self) -> StepModel:
        return _ModelCastByTrl(self)


class _ModelCastByTrl(StepModel):
    def build(self) -> nn.Module:
        built: Any = super().build()
        for module in (built.model.get_input_embeddings(), built.model.get_output_embeddings()):
            module.weight.data = module.weight.data.bfloat16()
        return built
