"""How many layers are checkpointed: switched one by one, chosen by trials and timed steps, and more later."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.library import Trained, collate, failing, rows_of, tiny_model
from tests.helpers.ranks import run_ranks
from torchtune_adaptive import AdaptiveStep, LayerCheckpointing, UsageError, find_fastest
from torchtune_adaptive.core import Probe, strategies

LAYERS, WIDTH, ROWS = 8, 8, 8


class Run:
    """A chain of layers that keep much, trained within a memory limit."""

    def __init__(
        self,
        limit: str | None = None,
        checkpointed: int | None = None,
        configured: list[bool] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(WIDTH, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, WIDTH)
                )
                for _ in range(LAYERS)
            )
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.layers = LayerCheckpointing(list(self.model), configured=configured)
        self.step = AdaptiveStep(
            self.model,
            self.optimizer,
            self.forward,
            optimizer_steps=False,
            memory_limit=limit,
            activation_checkpointing=self.layers,
        )
        if checkpointed is not None:
            self.step.checkpoint_layers(checkpointed)

    def forward(self, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        return F.mse_loss(self.model(inputs), targets, reduction="sum"), targets.numel()

    def take(self, size: int = ROWS) -> tuple[float, list[torch.Tensor]]:
        torch.manual_seed(1)
        outcome = self.step(rows(ROWS), collate, size)
        gradients = [each.grad.clone() for each in self.model.parameters() if each.grad is not None]
        self.optimizer.step()
        return outcome.loss, gradients


def rows(count: int) -> list[Any]:
    """Rows of many positions."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, count, 64, WIDTH, generator=generator)
    return list(zip(*both, strict=True))


def worst(count: int) -> Any:
    return collate(rows(count))


def test_no_number_of_layers_changes_a_bit() -> None:
    expected = Run(checkpointed=LAYERS).take()
    for checkpointed in range(LAYERS):
        loss, gradients = Run(checkpointed=checkpointed).take()
        assert loss == expected[0]
        assert len(gradients) == 4 * LAYERS and all(map(torch.equal, gradients, expected[1]))


@pytest.mark.parametrize("needed", range(9))
def test_the_fewest_are_found(needed: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number >= needed

    assert strategies.fewest(8, fits) == needed
    assert len(tried) <= 4 and 8 not in tried and len({*tried}) == len(tried)


def recomputed(run: Run) -> list[str]:
    """What is computed again of each layer."""
    switches: list[Any] = [layer.forward for layer in run.model]
    return [each.recomputed for each in switches]


def counting(run: Run) -> None:
    """Let the device's clock count what layers compute, so that timings do not depend on the machine."""
    computed = [0]

    def count(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        computed[0] += output.numel()

    for layer in run.model:
        layer[1].register_forward_hook(count)  # type: ignore[index]
    run.step.train_step.memory.clock = lambda: float(computed[0])  # type: ignore[method-assign]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("limit", "expected"), [("2MiB", (1, 1)), ("12MiB", (4, 0)), ("1GiB", (8, 0))]
)
def test_the_fewest_layers_that_memory_allows_and_no_trace(
    limit: str, expected: tuple[int, int]
) -> None:
    run, same = Run(limit), Run(limit, checkpointed=expected[1])
    counting(run)
    random = torch.get_rng_state()
    size = find_fastest(run.step, worst, rows=ROWS, headroom=0.0)
    assert torch.equal(torch.get_rng_state(), random)
    layers = [each == "everything" for each in recomputed(run)]
    assert (size, size.checkpointed, sum(layers)) == (*expected, expected[1])
    assert size.why.startswith(f"{expected[1]} of 8 layers checkpointed, ")
    assert size.gain > 1.05
    assert run.take(size)[0] == same.take(size)[0]
    assert all(map(torch.equal, run.model.parameters(), same.model.parameters()))
    assert run.step.retried_steps == 0


def test_nothing_changes_where_nothing_gains() -> None:
    run = Run("1GiB")
    run.step.train_step.memory.clock = iter(range(1000)).__next__  # type: ignore[method-assign]
    size = find_fastest(run.step, worst, rows=ROWS)
    assert (size, size.checkpointed, size.gain) == (8, 8, 1.0)
    assert size.why == "all 8 layers checkpointed, as fewer gain nothing"


EVERY_SECOND = [True, False] * (LAYERS // 2)


def test_configured_layers_stay_where_nothing_gains() -> None:
    for on, kept in ((EVERY_SECOND, 4), ([False] * LAYERS, 0), ([True] * 3 + [False] * 5, 3)):
        run = Run("1GiB", configured=on)
        assert [each == "everything" for each in recomputed(run)] == on
        run.step.train_step.memory.clock = iter(range(1000)).__next__  # type: ignore[method-assign]
        size = find_fastest(run.step, worst, rows=ROWS)
        assert [each == "everything" for each in recomputed(run)] == on
        assert (size, size.checkpointed, size.gain) == (8, kept, 1.0)
        assert size.why == f"{kept} of 8 layers checkpointed, as configured: others gain nothing"


def test_configured_layers_are_one_of_the_ways_that_are_timed() -> None:
    """With the largest micro-batch that fits with them, and no other is compared with it."""
    run = Run("12MiB", configured=EVERY_SECOND)
    counting(run)
    tried: list[tuple[int, str]] = []
    timed = Probe.timed

    def noted(probe: Probe, name: str, batches: Any, steps: int) -> Any:
        tried.append((len(batches[0][0]), run.layers.now))
        return timed(probe, name, batches, steps)

    with mock.patch.object(Probe, "timed", noted):
        size = find_fastest(run.step, worst, rows=ROWS, headroom=0.0)
    own = [rows for rows, layers in tried if layers == "configured"]
    largest = max(rows for rows, layers in tried if layers == "all")
    assert own and 0 < own[0] <= largest
    assert (
        "configured, " not in size.why and "x the speed of the 4 that were configured" in size.why
    )


def test_where_configured_layers_do_not_fit_all_are_in_their_place() -> None:
    limit = "1MiB"
    run, same = Run(limit, configured=[False] * 7 + [True]), Run(limit)
    for each in (run, same):
        each.step.train_step.memory.clock = iter(range(1000)).__next__  # type: ignore[method-assign]
    sizes = [find_fastest(each.step, worst, rows=ROWS) for each in (run, same)]
    assert sizes[0] == sizes[1] and sizes[0].checkpointed == sizes[1].checkpointed
    assert sizes[0].why == sizes[1].why


def test_a_run_that_is_resumed_has_its_configured_layers() -> None:
    run, other = (Run(configured=EVERY_SECOND) for _ in range(2))
    run.take(4)
    other.step.checkpoint_layers(0)
    other.step.load_state_dict(run.step.state_dict())
    assert [each == "everything" for each in recomputed(other)] == EVERY_SECOND
    with pytest.raises(UsageError, match=r"^configured: it says of 2 layers"):
        LayerCheckpointing(list(run.model), configured=[True, False])


def lost_and_resumed(way: str) -> list[Any]:
    """Steps with one of two layers checkpointed; memory runs out in the second, on the first rank."""
    model = tiny_model(way)
    inner: Any = model.module if way == "ddp" else model
    layers = LayerCheckpointing(list(inner.children()))
    run, memory = failing(way, model=model, activation_checkpointing=layers, grow_back_after=2)
    run.step.checkpoint_layers(1)
    seen: list[Any] = []
    for number in range(5):
        with memory.fail_at(9 if number == 1 and run.step.ranks.is_zero else None):
            outcome = run.step(rows_of(1, number), collate, 1)
        seen.append((outcome.loss, outcome.retried, run.step.state_dict()["recovery"]["relief"]))
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_all_layers_before_smaller_micro_batches_and_back(way: str) -> None:
    one, other = run_ranks(lost_and_resumed, 2, way)
    assert one == other
    assert [retried for _, retried, _ in one] == [0, 1, 0, 0, 0]
    assert [relief for _, _, relief in one] == [0, 1, 0, 0, 0]  # for the next step


def chosen_on_ranks(way: str) -> tuple[Any, ...]:
    model = tiny_model(way, layers=4)
    inner: Any = model.module if way == "ddp" else model
    layers = LayerCheckpointing(list(inner.children()))
    run = Trained(way, model=model, activation_checkpointing=layers, memory_limit="1GiB")
    size = find_fastest(run.step, lambda count: collate(rows_of(count)), rows=4)
    return int(size), size.checkpointed, size.why


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_ranks_choose_together(way: str) -> None:
    one, other = run_ranks(chosen_on_ranks, 2, way)
    assert one == other


def test_resumed_with_the_layers_of_before() -> None:
    run, other = Run(checkpointed=3), Run()
    run.take(4)
    other.step.load_state_dict(run.step.state_dict())
    assert other.step.state_dict() == run.step.state_dict()
    assert other.step.state_dict()["knobs"] == {
        "adaptive_batching.activation_checkpointing": "3_of_8"
    }
    switched = recomputed(other)
    assert switched == ["everything"] * 3 + ["nothing"] * 5


def test_misuse() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"^layers: .* Pass its modules"):
        LayerCheckpointing([])
    with pytest.raises(UsageError, match=r"^layers: one is there twice"):
        LayerCheckpointing([layer, layer])
    with pytest.raises(UsageError, match=r"^checkpointed: 2 of 1 layers"):
        LayerCheckpointing([layer]).set(2)
    with pytest.raises(UsageError, match=r"^step: find_fastest chooses among layers"):
        find_fastest(Run, worst, rows=4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^activation_checkpointing: 3_of_8 cannot be used"):
        LayerCheckpointing([layer]).use("3_of_8")
