"""Lightning Fabric, with DistributedDataParallel. Run it with

torchrun --nproc_per_node 2 examples/fabric.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import VOCABULARY, compare, less_memory, rows, worst_case
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import nn

from torchtune_adaptive import AdaptiveStep, find_batch_size, steps_of


def train(fabric: Fabric, disturbed: bool, known: int | None = None) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    plain = nn.Sequential(nn.Embedding(VOCABULARY, 64), layer, nn.Linear(64, VOCABULARY))
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))

    def forward(tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits, labels = model(tokens)[:, :-1], tokens[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, labels.numel()

    step = AdaptiveStep(model, optimizer, forward, memory_limit="16MiB")
    size = known or find_batch_size(step, worst_case, ceiling=64)
    losses = []
    for number, batch in enumerate(steps_of(rows(512), rows=64)):
        low = disturbed and number == 1 and fabric.global_rank == 0  # on one rank only
        with less_memory(step, 6 << 20, low):
            outcome = step(batch, torch.stack, size)
        losses.append(outcome.loss)
        assert outcome.retried or not low, "memory should have run out"
    return int(size), losses


if __name__ == "__main__":
    fabric = Fabric(accelerator="auto", devices=2, strategy=DDPStrategy(broadcast_buffers=False))
    fabric.launch()
    size, losses = train(fabric, disturbed=True)
    _, undisturbed = train(fabric, disturbed=False, known=size)
    compare(losses, undisturbed, fabric.global_rank)
    dist.destroy_process_group()
