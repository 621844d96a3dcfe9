"""The models and rows of MosaicML llm-foundry's table of throughputs.

Assumed about the models, where the table does not say: layer norms and linear layers with biases, GELU (erf)
with four times the width, learned positions, one matrix for embedding and head, no dropout, a vocabulary of
50,368. Theirs is sharded with FSDP1, here with FSDP2 in the same units: parameters in fp32, gathered in bf16
and reduced in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from torchtune_adaptive.library.model_steps import StepsOfModel
from torchtune_adaptive.library.step_questions import ANY_LENGTH, StepQuestion
from torchtune_adaptive.planner.memory.peak import DeviceLimits
from torchtune_adaptive.planner.speed.devices import SPEEDS, Speeds
from torchtune_adaptive.planner.speed.operations import (
    StepOperations,
    at_rows,
    packed_up,
    unpacked,
)
from torchtune_adaptive.planner.speed.speed import Pace, Speed
from torchtune_adaptive.planner.traced_run import Question

SOURCE = "MosaicML llm-foundry, scripts/train/benchmarking/README.md"
TRITON_ATTENTION = 1.8
"""Factor by which attention in Triton, as it was in 2022 and 2023, is slower than FlashAttention-2: the
middle (geometric) of the 1.3 to 2.5 that the paper of the latter gives (arXiv 2307.08691)."""
FEW, MANY = 2, 3
"""Rows of the steps that are traced."""
VOCABULARY = 50_368
SHAPES = {  # width, heads, layers
    "125m": (768, 12, 12),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
}
RANKS = 8


@dataclass(frozen=True)
class Row:
    device: str
    model: str
    length: int
    rows: int
    accumulation: int
    checkpointed: bool
    published: float
    """Tokens/s of one GPU."""
    predicted_blind: float
    """What was predicted before anybody had seen the row."""

    @property
    def name(self) -> str:
        ac = " ac" if self.checkpointed else ""
        return f"{self.model} s{self.length} x{self.rows} a{self.accumulation} n{RANKS}{ac}"

    @property
    def step(self) -> tuple[str, int, bool, int]:
        """What its trace depends on."""
        return self.model, self.length, self.checkpointed, min(2, self.accumulation)


A100, H100 = "a100-80gb", "h100-80gb"
ROWS = [
    Row(A100, "125m", 2048, 40, 2, False, 142_830, 189_464),
    Row(A100, "125m", 2048, 32, 2, False, 141_737, 187_813),
    Row(H100, "13b", 1024, 40, 3, True, 5_502, 6_544),
    Row(A100, "13b", 1024, 40, 3, True, 2_330, 2_450),
    Row(A100, "13b", 2048, 2, 3, False, 2_262, 2_658),
    Row(H100, "13b", 4096, 10, 3, True, 4_717, 5_823),
    Row(A100, "13b", 4096, 10, 3, True, 2_060, 2_264),
    Row(A100, "1b", 2048, 14, 4, False, 20_513, 24_129),
    Row(H100, "1b", 512, 56, 4, False, 52_275, 68_330),
    Row(A100, "1b", 512, 56, 4, False, 23_148, 26_169),
    Row(H100, "3b", 512, 40, 6, False, 27_965, 33_740),
    Row(A100, "3b", 512, 40, 6, False, 12_127, 13_404),
    Row(H100, "3b", 8192, 3, 6, False, 16_578, 22_666),
    Row(A100, "3b", 8192, 3, 6, False, 7_695, 9_875),
    Row(H100, "760m", 2048, 24, 2, False, 63_147, 92_534),
    Row(A100, "760m", 2048, 24, 2, False, 32_434, 39_075),
    Row(H100, "7b", 1024, 64, 2, True, 10_203, 12_355),
    Row(A100, "7b", 1024, 64, 2, True, 4_357, 4_679),
    Row(H100, "7b", 2048, 6, 1, False, 10_643, 13_580),
    Row(A100, "7b", 2048, 6, 2, False, 4_641, 5_279),
    Row(H100, "7b", 32768, 2, 2, True, 3_318, 4_852),
    Row(A100, "7b", 32768, 2, 2, True, 1_672, 2_293),
    Row(H100, "7b", 4096, 16, 2, True, 8_611, 10_747),
    Row(A100, "7b", 4096, 16, 2, True, 3_684, 4_251),
    Row(H100, "7b", 8192, 8, 2, True, 6_935, 9_158),
    Row(A100, "7b", 8192, 8, 2, True, 3_206, 3_789),
]


class FusedCrossEntropy(torch.autograd.Function):
    """Stands for a cross entropy of one kernel forward and one backward, which writes the gradient over the
    logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.amax(-1).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0].mul_(gradient)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, name: str, length: int, checkpointed: bool) -> None:
        super().__init__()
        width, heads, layers = SHAPES[name]
        self.checkpointed = checkpointed
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(at)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def build(name: str, length: int, checkpointed: bool) -> nn.Module:
    model = Model(name, length, checkpointed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def forward(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    return FusedCrossEntropy.apply(model(tokens)), tokens.numel()


def batch(length: int, rows: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def traced(name: str, length: int, checkpointed: bool, accumulation: int) -> list[dict[str, Any]]:
    """The operations of a step with few rows, and with more; in a process of its own."""
    question = StepQuestion(
        build=partial(build, name, length, checkpointed),
        optimizer=optimizer,
        forward=forward,
        worst_case=partial(batch, length),
        ranks=RANKS,
        max_grad_norm=1.0,
        asked=Question(DeviceLimits("any", 1 << 40), None, 1, accumulation),
        assumptions=(),
    )
    steps = StepsOfModel(question)
    found = [steps.step(rows, ANY_LENGTH).operations for rows in (FEW, MANY)]
    return [packed_up(step) for step in found if step is not None]


def step_of(row: Row, traces: list[dict[str, Any]]) -> StepOperations:
    few, many = map(unpacked, traces)
    return at_rows(few, many, (row.rows - FEW) / (MANY - FEW))


def predicted(row: Row, step: StepOperations, attention_of_then: bool) -> Speed:
    """The speed with the kernels of today, or with the attention of the table's time."""
    speeds: Speeds = SPEEDS[row.device]
    if attention_of_then:
        forward, backward = (share / TRITON_ATTENTION for share in speeds.attention)
        speeds = replace(speeds, attention=(forward, backward))
    pace = Pace(speeds, RANKS, compiled=False, quantized=False, dtype="bfloat16")
    return pace.speed(step, row.rows, row.length, row.accumulation)
