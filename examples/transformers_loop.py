"""A transformers model, made from a config, in a loop of one's own. Run it with

torchrun --nproc_per_node 2 examples/transformers_loop.py
"""

import torch
import torch.distributed as dist
from common import LLAMA, compare, less_memory, rows, worst_case
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from torchtune_adaptive import AdaptiveStep, find_batch_size, steps_of


def train(disturbed: bool, known: int | None = None) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward(tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        # transformers divides the summed loss by num_items_in_batch; the step divides it itself.
        output = model(input_ids=tokens, labels=tokens, num_items_in_batch=1)
        return output.loss, tokens[:, 1:].numel()

    step = AdaptiveStep(model, optimizer, forward, memory_limit="16MiB", max_grad_norm=1.0)
    size = known or find_batch_size(step, worst_case, ceiling=64)
    losses = []
    for number, batch in enumerate(steps_of(rows(512), rows=64)):
        low = disturbed and number == 1 and dist.get_rank() == 0  # on one rank only
        with less_memory(step, 5 << 20, low):
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
