"""Plain PyTorch with tensor parallelism in pairs of ranks, and FSDP2 over the pairs. Run it with

torchrun --nproc_per_node 4 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import VOCABULARY, compare, less_memory, rows, worst_case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchtune_adaptive import AdaptiveStep, find_batch_size, steps_of

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


def train(disturbed: bool, known: int | None = None) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Embedding(VOCABULARY, 64), Layer(), Layer(), nn.Linear(64, VOCABULARY))
    for part in model:
        if isinstance(part, Layer):
            parallelize_module(part, mesh["tp"], PLAN)
        fully_shard(part, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def forward(tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits, labels = model(tokens)[:, :-1], tokens[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, labels.numel()

    step = AdaptiveStep(model, optimizer, forward, memory_limit="16MiB")
    size = known or find_batch_size(step, worst_case, ceiling=64)
    losses = []
    for number, batch in enumerate(steps_of(rows(512), rows=64, mesh=mesh["dp"])):
        low = disturbed and number == 1 and dist.get_rank() == 0  # on one rank only
        with less_memory(step, 6 << 20, low):
            losses.append(step(batch, torch.stack, size).loss)
    return int(size), losses


if __name__ == "__main__":
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    size, losses = train(disturbed=True)
    _, undisturbed = train(disturbed=False, known=size)
    compare(losses, undisturbed, dist.get_rank())
    dist.destroy_process_group()
