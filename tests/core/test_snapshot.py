"""A snapshot restores a model and its optimizer bit-for-bit, whatever the optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.decoder import WITH_TORCHAO, adamw_8bit, local_values, same_bits
from torchtune_adaptive.core.device.memory import plain_tensors
from torchtune_adaptive.core.step.snapshot import Snapshot

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "8-bit AdamW": lambda p: adamw_8bit(p, lr=0.1),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    built = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Dropout(0.5), nn.Linear(128, 64)
    )
    built[3].bias.data[:4] = torch.tensor([-0.0, 0.0, float("nan"), float("inf")])
    built[0].bias.requires_grad_(False)
    return built


def take_step(built: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    built(torch.randn(8, 64)).nan_to_num().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(built: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*built.parameters(), *built.buffers()]
    values: list[Any] = []
    for group in optimizer.param_groups:
        values += [value for key, value in sorted(group.items()) if key != "params"]
    for state in optimizer.state.values():
        values += [value for _, value in sorted(state.items())]
    tensors += [v if isinstance(v, torch.Tensor) else torch.tensor(_number(v)) for v in values]
    generators = [
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.tensor(np.random.get_state()[1].astype("int64")),
    ]  # type: ignore[union-attr]
    return [plain.detach().clone() for t in tensors for plain in plain_tensors(t)] + generators


def _number(value: Any) -> Any:
    if value is None:
        return -1.0
    return [float(part) for part in value] if isinstance(value, tuple) else float(value)


@pytest.mark.parametrize(
    "make",
    [
        # torchao compiles the step of its optimizer, which takes a quarter of a minute.
        pytest.param(
            make, id=name, marks=[pytest.mark.exhaustive, WITH_TORCHAO] if "8-bit" in name else []
        )
        for name, make in OPTIMIZERS.items()
    ],
)
@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
def test_every_bit_is_restored(make: Callable[[Any], torch.optim.Optimizer], resumed: bool) -> None:
    built = model()
    optimizer = make([p for p in built.parameters() if p.requires_grad])
    if resumed:
        take_step(built, optimizer)
        take_step(built, optimizer)
    before, had_state = everything(built, optimizer), bool(optimizer.state)
    snapshot = Snapshot(built, [optimizer], torch.device("cpu"))
    for _ in range(3):
        take_step(built, optimizer)
        random.random()
        np.random.random()
    assert not same_bits(before, everything(built, optimizer))
    snapshot.close()
    assert same_bits(before, everything(built, optimizer))
    assert bool(optimizer.state) is had_state
    # Training continues as in an undisturbed run.
    undisturbed = model()
    its_optimizer = make([p for p in undisturbed.parameters() if p.requires_grad])
    if resumed:
        take_step(undisturbed, its_optimizer)
        take_step(undisturbed, its_optimizer)
    torch.manual_seed(3)
    take_step(undisturbed, its_optimizer)
    torch.manual_seed(3)
    take_step(built, optimizer)
    assert same_bits(local_values(undisturbed), local_values(built))


def test_between_trials_a_fresh_optimizer_keeps_its_memory() -> None:
    built = model()
    optimizer = torch.optim.AdamW(built.parameters())
    snapshot = Snapshot(built, [optimizer], torch.device("cpu"))
    values = local_values(built)
    take_step(built, optimizer)
    snapshot.restore()
    assert optimizer.state, "the next trial needs it resident"
    assert same_bits(values, local_values(built))


class PagedMomentum(torch.optim.Optimizer):
    """SGD with momentum whose state is paged as in bitsandbytes: whatever it makes, it keeps for ever."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.made: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["state1"] = torch.zeros_like(parameter)
                    state["state1"].is_paged = True
                    state["qmap1"] = torch.linspace(-1, 1, 16)
                    self.made.append(state["state1"])
                state["step"] += 1
                state["state1"].mul_(0.9).add_(parameter.grad)
                parameter.add_(state["state1"] / state["step"], alpha=-group["lr"])


def test_paged_state_that_is_never_freed_is_reset_and_not_made_again() -> None:
    searched, plain = model(), model()
    optimizers = [PagedMomentum(searched.parameters()), PagedMomentum(plain.parameters())]
    snapshot = Snapshot(searched, [optimizers[0]], torch.device("cpu"))
    for _ in range(2):
        take_step(searched, optimizers[0])
        snapshot.restore()
    snapshot.close()
    made = len(optimizers[0].made)
    for built, optimizer in zip((searched, plain), optimizers, strict=True):
        torch.manual_seed(1)
        for _ in range(3):
            take_step(built, optimizer)
    assert len(optimizers[0].made) == made == len(optimizers[1].made)
    assert same_bits(local_values(searched), local_values(plain))
    for state in optimizers[0].state.values():
        assert torch.equal(state["qmap1"], torch.linspace(-1, 1, 16))
