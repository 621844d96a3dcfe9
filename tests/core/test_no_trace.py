"""A search leaves no bit of the run changed, whatever it tried and however that ended."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.decoder import (
    WITH_TORCHAO,
    adamw_8bit,
    batch,
    local_values,
    same_bits,
    step_in_backward,
    tiny_decoder,
    train_step,
)
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core.device.memory import plain_tensors
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.search.strategies import STRATEGIES, find_largest
from torchtune_adaptive.core.sizes.split import candidates
from torchtune_adaptive.core.step.train_step import TrainStep

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

LIMIT = 250_000

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "8-bit AdamW": lambda p: adamw_8bit(p, lr=0.1, block_size=8),
}


def build(
    optimizer: str, adapters: bool, in_backward: bool = False
) -> tuple[nn.Module, list[torch.optim.Optimizer], TrainStep]:
    model = tiny_decoder(adapters=adapters, layers=2, dropout=0.1, checkpointing=adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if in_backward:
        by_parameter = {p: OPTIMIZERS[optimizer]([p]) for p in trained}
        step_in_backward(by_parameter)
        optimizers = list(by_parameter.values())
    else:
        optimizers = [OPTIMIZERS[optimizer](trained)]
    step = train_step(
        model,
        optimizers,
        memory=SimulatedMemory(LIMIT),
        clip_grad_norm=None if in_backward else 1.0,
        optimizer_in_backward=in_backward,
    )
    return model, optimizers, step


def short_rows(rows: int) -> dict[str, torch.Tensor]:
    return batch(rows=rows, length=16)


def find(
    step: TrainStep, strategy: str = "extrapolate", accumulation: int = 1
) -> tuple[int | None, int]:
    """A real search; the size that it found, and how many trials failed."""
    probe = Probe(
        step=step,
        accumulation=lambda size: accumulation,
        headroom=0.05,
        entering=lambda phase: None,
    )
    with probe:
        assert probe.prime(short_rows).fits
        result = find_largest(
            strategy, candidates("none", 60, 60), lambda n: probe.trial(n, short_rows)
        )
    return result.size, sum(not trial.fits for trial in result.trials)


def train(step: TrainStep, steps: int = 1) -> None:
    for number in range(steps):
        step.forward_backward(batch(rows=2, seed=10 * number + dist.get_rank()))
        assert not step.apply().lost


def state_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    generators = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    generators.append(torch.from_numpy(np.random.get_state()[1].astype("int64")))  # type: ignore[union-attr]
    return [part.detach().clone() for t in tensors for part in plain_tensors(t)] + generators


def search_leaves_no_trace(
    optimizer: str, adapters: bool, resumed: bool, in_backward: bool, accumulation: int
) -> None:
    torch.manual_seed(dist.get_rank())
    model, optimizers, step = build(optimizer, adapters, in_backward)
    if resumed:
        train(step, steps=2)
    modes = [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()]
    before, in_use = state_of(model, optimizers), step.memory.in_use()
    size, failures = find(step, accumulation=accumulation)
    assert size is not None and 1 < size < 60 and failures > 0
    assert same_bits(before, state_of(model, optimizers))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert modes == [
        (m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()
    ]
    assert all(bool(one.state) is resumed for one in optimizers)
    assert step.memory.in_use() == in_use
    # What follows is what would have followed: the same steps, with a run that never searched.
    random_state = torch.get_rng_state()
    train(step, steps=3)
    torch.manual_seed(dist.get_rank())
    other_model, _, other_step = build(optimizer, adapters, in_backward)
    if resumed:
        train(other_step, steps=2)
    torch.set_rng_state(random_state)
    train(other_step, steps=3)
    assert same_bits(local_values(model), local_values(other_model))


CASES = [
    ("AdamW", False, False, False, 1),
    ("AdamW", False, True, False, 2),
    ("AdamW", True, False, False, 2),
    ("AdamW", True, True, False, 1),
    ("fused AdamW", False, True, False, 1),
    ("SGD with momentum", False, False, False, 1),
    ("SGD with momentum", False, True, False, 1),
    pytest.param("8-bit AdamW", False, False, False, 1, marks=WITH_TORCHAO),
    pytest.param("8-bit AdamW", False, True, False, 1, marks=WITH_TORCHAO),
    ("AdamW", False, False, True, 1),
    ("AdamW", False, True, True, 1),
    ("SGD with momentum", False, True, True, 1),
]


@pytest.mark.rotating(2)
@pytest.mark.parametrize(("optimizer", "adapters", "resumed", "in_backward", "accumulation"), CASES)
def test_a_search_leaves_no_trace(
    optimizer: str, adapters: bool, resumed: bool, in_backward: bool, accumulation: int
) -> None:
    run_ranks(
        search_leaves_no_trace,
        2,
        optimizer,
        adapters,
        resumed,
        in_backward,
        accumulation,
    )


def find_every_way() -> list[int | None]:
    _, _, step = build("AdamW", adapters=False)
    return [find(step, strategy)[0] for strategy in STRATEGIES]


def test_all_strategies_find_the_same_on_a_real_model() -> None:
    for sizes in run_ranks(find_every_way, 2):
        assert len(set(sizes)) == 1 and sizes[0] is not None


def find_twice() -> list[Any]:
    _, _, step = build("AdamW", adapters=False)
    measured = []
    for _ in range(2):
        probe = Probe(
            step=step,
            accumulation=lambda size: 1,
            headroom=0.0,
            entering=lambda phase: None,
        )
        with probe:
            probe.prime(short_rows)
            measured.append([probe.trial(n, short_rows).reports for n in (1, 2, 4, 50, 4, 2)])
    return measured


def test_measurements_are_repeatable_to_the_byte() -> None:
    for first, second in run_ranks(find_twice, 2):
        assert first == second
        assert first[1] == first[5] and first[2] == first[4], "also after a trial that failed"


def find_with_ranks_of_different_size() -> Any:
    ranks = Ranks(timeout=200)
    model = tiny_decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    memory = SimulatedMemory(LIMIT if ranks.rank == 0 else LIMIT // 2)
    step = train_step(model, [optimizer], memory=memory, ranks=ranks)
    probe = Probe(
        step=step,
        accumulation=lambda size: 1,
        headroom=0.05,
        entering=lambda phase: None,
    )
    with probe:
        probe.prime(short_rows)
        return find_largest(
            "extrapolate", candidates("none", 60, 60), lambda n: probe.trial(n, short_rows)
        )


def test_the_smallest_rank_decides_and_is_named() -> None:
    first, second = run_ranks(find_with_ranks_of_different_size, 2)
    assert first.size == second.size
    last_failure = next(trial for trial in reversed(first.trials) if not trial.fits)
    assert last_failure.deciding_rank == 1
    assert [report.usable_bytes for report in last_failure.reports] == [
        int(LIMIT * 0.95),
        int(LIMIT // 2 * 0.95),
    ]
