"""Plain PyTorch with FSDP2. Run it with

torchrun --nproc_per_node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import VOCABULARY, compare, less_memory, rows, worst_case
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchtune_adaptive import AdaptiveStep, find_batch_size, steps_of


def train(disturbed: bool, known: int | None = None) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    layer = lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)  # noqa: E731
    model = nn.Sequential(nn.Embedding(VOCABULARY, 64), layer(), layer(), nn.Linear(64, VOCABULARY))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward(tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits, labels = model(tokens)[:, :-1], tokens[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, labels.numel()

    step = AdaptiveStep(model, optimizer, forward, memory_limit="16MiB")
    size = known or find_batch_size(step, worst_case, ceiling=64)
    losses = []
    for number, batch in enumerate(steps_of(rows(512), rows=64)):
        low = disturbed and number == 1 and dist.get_rank() == 0  # on one rank only
        with less_memory(step, 6 << 20, low):
            outcome = step(batch, torch.stack, size)
        losses.append(outcome.loss)
        assert outcome.retried or not low, "memory should have run out"
    return int(size), losses


if __name__ == "__main__":
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    size, losses = train(disturbed=True)
    _, undisturbed = train(disturbed=False, known=size)
    compare(losses, undisturbed, dist.get_rank())
    dist.destroy_process_group()
