"""A decoder of plain torch, as small as it can be, and steps of it: what tests of ``core`` train.

Its modules have the names that torchtune's have, and are spread over ranks in the same ways.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from torchtune_adaptive.core.device.memory import DeviceMemory
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.step.objective import NextTokenPrediction, Objective
from torchtune_adaptive.core.step.train_step import StepOptions, TrainStep

VOCABULARY = 16


class Norm(nn.Module):
    """The root mean square of activations is divided out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


class Adapted(nn.Linear):
    """A projection that stays as it is, with an adapter that is trained."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.weight.requires_grad_(False)
        self.adapter_a = nn.Linear(inputs, 2, bias=False)
        self.adapter_b = nn.Linear(2, outputs, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 2 * self.adapter_b(self.adapter_a(self.dropout(x)))


def _rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Queries or keys of shape (rows, tokens, heads, width), turned by their positions."""
    half = heads.shape[-1] // 2
    angles = positions[..., None, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = heads.chunk(2, dim=-1)
    sine, cosine = angles.sin(), angles.cos()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Attention(nn.Module):
    """Causal attention in which two heads share keys and values."""

    def __init__(self, width: int, heads: int, adapters: bool, dropout: float) -> None:
        super().__init__()
        self.width, self.dropout = width // heads, dropout

        def projection(outputs: int) -> nn.Linear:
            if adapters:
                return Adapted(width, outputs, dropout)
            return nn.Linear(width, outputs, bias=False)

        self.q_proj, self.v_proj = projection(width), projection(width // 2)
        self.k_proj = nn.Linear(width, width // 2, bias=False)
        self.output_proj = nn.Linear(width, width, bias=False)
        self.attend: Any = F.scaled_dot_product_attention

    def forward(self, x: torch.Tensor, y: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(each).unflatten(-1, (-1, self.width))
            for projection, each in ((self.q_proj, x), (self.k_proj, y), (self.v_proj, y))
        )
        q, k = _rotated(q, positions), _rotated(k, positions)
        k, v = (each.repeat_interleave(2, dim=2) for each in (k, v))
        dropout = self.dropout if self.training else 0.0
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        seen = self.attend(q, k, v, dropout_p=dropout, is_causal=True)
        return self.output_proj(seen.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A gated projection and back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention and what follows it, whose activations may be computed again in backward."""

    def __init__(self, width: int, heads: int, hidden: int, adapters: bool, dropout: float) -> None:
        super().__init__()
        self.sa_norm, self.attn = Norm(width), Attention(width, heads, adapters, dropout)
        self.mlp_norm, self.mlp = Norm(width), FeedForward(width, hidden)
        self.recomputed = False

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.recomputed:
            return checkpoint(self._forward, x, positions, use_reentrant=False)
        return self._forward(x, positions)

    def _forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed = self.sa_norm(x)
        x = x + self.attn(normed, normed, positions=positions)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Predicts the next token of each position; its logits may come in chunks of positions."""

    def __init__(
        self,
        layers: int = 1,
        width: int = 8,
        heads: int = 2,
        hidden: int = 12,
        *,
        adapters: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, hidden, adapters, dropout) for _ in range(layers)
        )
        self.norm = Norm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.chunks = 2
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=0.2)
            parameter.requires_grad_(not adapters or "adapter" in name)

    def forward(
        self, tokens: torch.Tensor, input_pos: torch.Tensor | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        positions = torch.arange(tokens.shape[1]) if input_pos is None else input_pos
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        x = self.norm(x)
        if not self.chunks:
            return self.output(x)
        return [self.output(chunk) for chunk in x.chunk(self.chunks, dim=1)]


def tiny_decoder(
    *,
    adapters: bool = False,
    checkpointing: bool = False,
    sharded: bool = True,
    layers: int = 1,
    reshard: bool = True,
    output_apart: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
) -> Decoder:
    """A decoder with random weights, the same on every rank, then sharded."""
    torch.manual_seed(seed)
    model = Decoder(layers, adapters=adapters, dropout=dropout)
    for layer in model.layers:
        layer.recomputed = checkpointing  # type: ignore[assignment]
    if sharded:
        apart = [model.tok_embeddings, model.output] if output_apart else []
        for module in (*apart, *model.layers, model):
            fully_shard(module, reshard_after_forward=reshard)
    return model


class ChunkedCrossEntropy(nn.Module):
    """The mean loss of all tokens that count, of logits in chunks."""

    ignore_index = -100

    def __init__(self, num_output_chunks: int = 2) -> None:
        super().__init__()
        self.num_output_chunks = num_output_chunks

    def forward(self, logits: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        parts = labels.chunk(self.num_output_chunks, dim=1)
        losses = [
            F.cross_entropy(each.flatten(0, 1), part.flatten(), ignore_index=-100, reduction="sum")
            for each, part in zip(logits, parts, strict=True)
        ]
        return torch.stack(losses).sum() / (labels != self.ignore_index).sum()


def batch(rows: int = 2, length: int = 8, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = tokens.clone()
    labels[:, : length // 3] = -100
    return {"tokens": tokens, "labels": labels}


def train_step(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    objective: Objective | None = None,
    memory: DeviceMemory | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> TrainStep:
    return TrainStep(
        model=model,
        objective=objective or NextTokenPrediction(ChunkedCrossEntropy()),
        optimizers=optimizers,
        device=torch.device("cpu"),
        memory=memory or SimulatedMemory(None),
        ranks=ranks or Ranks(timeout=200),
        options=StepOptions(**options),
    )


def step_in_backward(by_parameter: dict[nn.Parameter, torch.optim.Optimizer]) -> None:
    """Let each parameter's optimizer step as soon as its gradient is there."""

    def step(parameter: nn.Parameter) -> None:
        by_parameter[parameter].step()
        by_parameter[parameter].zero_grad()

    for parameter in by_parameter:
        parameter.register_post_accumulate_grad_hook(step)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": 1e-2, **settings})


WITH_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")


def adamw_8bit(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer whose state is quantized."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, **settings)


def local_values(model: nn.Module) -> list[torch.Tensor]:
    """This rank's part of every parameter, copied."""
    return [
        (p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()
    ]


def same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Bit-for-bit equal, including NaNs and the sign of zero."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        for a, b in zip(left, right, strict=True)
    )
