"""What FSDP2's hooks take of the host, in launches: beside the operations of the layers that they stand at.

    python benchmarks/fsdp_host.py [--rounds 60]

The same decoder, plain and sharded over 8 ranks of which only this one exists, takes turns in one process. A
deeper and a shallower one tell what a layer takes. A launch is what the host needs for an operation of the
plain layer: they are so small that the CPU computes next to nothing. Minima count, as whatever else runs only
adds.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torchtune.models.llama2 import llama2, lora_llama2

RANKS, DEPTHS = 8, (8, 24)
_SHAPE = {
    "vocab_size": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "embed_dim": 16,
    "intermediate_dim": 32,
    "max_seq_len": 32,
}
_LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8.0,
}


class Cost(NamedTuple):
    """What a layer takes: its operations, seconds of the host, and of FSDP's hooks."""

    operations: float
    plain: float
    hooks: float

    @property
    def launches(self) -> float:
        """The hooks' time in launches."""
        return self.hooks * self.operations / self.plain


class _Counting(TorchDispatchMode):
    """Counts operations, without views."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += not any(one.alias_info for one in func._schema.returns)
        return func(*args, **(kwargs or {}))


def full(layers: int) -> nn.Module:
    return llama2(num_layers=layers, **_SHAPE)


def lora(layers: int) -> nn.Module:
    made: nn.Module = lora_llama2(num_layers=layers, **_SHAPE, **_LORA)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("lora" in name)
    return made


def sharded(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module) -> float:
    """Seconds of the host in a forward and a backward pass."""
    before = time.process_time()
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    took = time.process_time() - before
    for parameter in model.parameters():
        parameter.grad = None
    return took


def costs_of(makes: Sequence[Callable[[int], nn.Module]], rounds: int) -> list[Cost]:
    """The cost of a layer of each model. All take turns, as the machine is not equally fast all the time."""
    kinds = [(make, layers) for make in makes for layers in DEPTHS]
    counts = []
    for make, layers in kinds:
        with _Counting() as counting:
            step(make(layers))
        counts.append(counting.number)
    models = [model for make, layers in kinds for model in (make(layers), sharded(make(layers)))]
    times = [[step(model) for model in models] for _ in range(rounds)]
    least = [*map(min, zip(*times, strict=True))]
    of_each = [*zip(counts, least[::2], least[1::2], strict=True)]
    further = DEPTHS[1] - DEPTHS[0]
    found = []
    for few, many in zip(of_each[::2], of_each[1::2], strict=True):
        operations, plain, split = ((b - a) / further for a, b in zip(few, many, strict=True))
        found.append(Cost(operations, plain, split - plain))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=60)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    print(f"torch {torch.__version__}, {platform.machine()}; least of {rounds} rounds\n")
    costs = costs_of((full, lora), rounds)
    for name, one in zip(("full", "LoRA"), costs, strict=True):
        launch = 1e6 * one.plain / one.operations
        print(
            f"{name}: {one.operations:.0f} operations in a layer, {launch:.1f} us for each; ",
            end="",
        )
        print(f"hooks {1e6 * one.hooks:,.0f} us, as long as {one.launches:.0f} launches")
    # Two gathers and a reduction: of 9 parameters each, or of 23, 23 and 14.
    each = (costs[1].launches - costs[0].launches) / (2 * 23 + 14 - 3 * 9)
    print(f"a collective {costs[0].launches / 3 - 9 * each:.0f} launches, ", end="")
    print(f"a parameter in it {each:.1f}")


if __name__ == "__main__":
    main()
