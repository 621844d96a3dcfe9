"""accelerate in a loop of one's own, which gathers a metric in its forward pass. Run it with

torchrun --nproc_per_node 2 examples/accelerate_loop.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from common import VOCABULARY, compare, less_memory, rows, worst_case
from torch import nn

from torchtune_adaptive import AdaptiveStep, find_batch_size, steps_of


def train(
    accelerator: Accelerator, disturbed: bool, known: int | None = None
) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    plain = nn.Sequential(nn.Embedding(VOCABULARY, 64), layer, nn.Linear(64, VOCABULARY))
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))

    def forward(tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits, labels = model(tokens)[:, :-1], tokens[:, 1:]
        correct = (logits.argmax(-1) == labels).sum()
        step.collective(accelerator.gather, correct).sum()  # a metric of all ranks
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, labels.numel()

    step = AdaptiveStep(model, optimizer, forward, memory_limit="16MiB", max_grad_norm=1.0)
    size = known or find_batch_size(step, worst_case, ceiling=64)
    losses = []
    for number, batch in enumerate(steps_of(rows(512), rows=64)):
        low = disturbed and number == 1 and accelerator.process_index == 0  # on one rank only
        with less_memory(step, 6 << 20, low):
            outcome = step(batch, torch.stack, size)
        losses.append(outcome.loss)
        assert outcome.retried or not low, "memory should have run out"
    return int(size), losses


if __name__ == "__main__":
    replicas = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[replicas])
    size, losses = train(accelerator, disturbed=True)
    _, undisturbed = train(accelerator, disturbed=False, known=size)
    compare(losses, undisturbed, accelerator.process_index)
    accelerator.end_training()
