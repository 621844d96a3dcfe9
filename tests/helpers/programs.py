"""Programs that train, to be planned as a user's own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive.planner import DeviceLimits, gpus, planned_gpu
from torchtune_adaptive.planner.programs import Program, ProgramPlan, plan_program

WIDTH, ROWS, TOKENS = 256, 8, 64
H100, MEMORY = gpus.gpu("h100"), 1 << 30

PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers={layers}, width={width}):
        super().__init__()
        self.tokens = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 100)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows():
    tokens = [torch.arange(number % {tokens} + 1) for number in range(200)]
    return [dict(input_ids=some, labels=some) for some in tokens]


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    pad = nn.functional.pad
    tokens = [pad(row["input_ids"], (0, longest - len(row["input_ids"]))) for row in rows]
    labels = [pad(row["labels"], (0, longest - len(row["labels"])), value=-100) for row in rows]
    return {{"input_ids": torch.stack(tokens), "labels": torch.stack(labels)}}


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
how = dict(batch_size={rows}, collate_fn=collate, shuffle=True)
loader = DataLoader(rows(), num_workers=2, pin_memory=True, **how)
loss_of = nn.CrossEntropyLoss(ignore_index=-100)
{before}
for number, batch in enumerate(loader):
    tokens, labels = batch["input_ids"].to(device), batch["labels"].to(device, non_blocking=True)
{step}
"""
STEP = """
optimizer.zero_grad()
loss = loss_of(model(tokens).flatten(0, 1), labels.flatten())
loss.backward()
optimizer.step()
"""


def written(
    folder: Path, step: str = STEP, before: str = "", layers: int = 3, text: str = PROGRAM
) -> Path:
    """A program that trains."""
    path = folder / "train.py"
    step = textwrap.indent(step, "    ")
    path.write_text(
        text.format(layers=layers, width=WIDTH, tokens=TOKENS, rows=ROWS, before=before, step=step)
    )
    return path


def planned(path: Path, *words: str, **options: Any) -> ProgramPlan:
    program = Program((str(path), *words), **{"gpu": H100, "cache": False, **options})
    with without_torchvision():
        return plan_program(program, on_part_of_h100, timeout=120)


def on_part_of_h100(ranks: int) -> list[tuple[DeviceLimits, None]]:
    return [(planned_gpu(H100, ranks, 0.05, MEMORY)[0], None)]
