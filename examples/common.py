"""What the examples share: the same tiny data, and a neighbor that takes memory in the middle of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from torchtune_adaptive import AdaptiveStep

VOCABULARY, LENGTH = 256, 32
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "vocab_size": VOCABULARY, "use_cache": False}


def rows(count: int) -> list[torch.Tensor]:
    """Rows of tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(VOCABULARY, (count, LENGTH), generator=generator))


def worst_case(count: int) -> torch.Tensor:
    """A micro-batch of that many rows, as long as any."""
    return torch.zeros(count, LENGTH, dtype=torch.long)


def less_memory(step: AdaptiveStep, limit: int, now: bool) -> AbstractContextManager[None]:
    """If it is ``now``, this process may use no more than ``limit`` bytes, as beside a greedy neighbor."""
    return step.train_step.memory.capped(limit) if now else nullcontext()


def compare(losses: list[float], undisturbed: list[float], rank: int) -> None:
    """Print the losses of both runs; smaller micro-batches only change how their sums are rounded."""
    for title, run in (("with a failure", losses), ("without       ", undisturbed)):
        if rank == 0:
            print(f"{title}: {', '.join(f'{loss:.6f}' for loss in run)}", flush=True)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(undisturbed), rtol=1e-5, atol=0)
