"""Gradients that FSDP reduces with the last micro-batch only: the bits and collectives of a plain loop that
does so, whoever runs out of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.helpers.counting import Launches
from tests.helpers.decoder import local_values, same_bits
from tests.helpers.faults import FailingMemory, fail_at_each, survivable
from tests.helpers.library import Trained, collate, failing, rows_of
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive import AdaptiveStep, UsageError, find_batch_size
from torchtune_adaptive.core.ranks import fsdp

pytestmark = pytest.mark.ranks
WIDTH, ROWS = 4, 8
half = torch.bfloat16


class Layers(nn.Module):
    """Layers that are computed again in backward, some of which have the same weight, or a frozen one."""

    def __init__(self, checkpoints: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.checkpoints = checkpoints
        if tied:
            self.layers[2].weight = self.layers[0].weight
        if frozen:
            self.layers[1].requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            run = partial(checkpoint, layer, use_reentrant=False) if self.checkpoints else layer
            inputs = run(inputs).sigmoid()
        return inputs


def sharded(
    build: Callable[[], nn.Module] = Layers, shape: tuple[int, ...] = (2,), **policy: Any
) -> nn.Module:
    model = build()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    shard = partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    first = 1 if any(model.layers[0].weight is each.weight for each in model.layers[1:]) else 0  # type: ignore[index, union-attr]
    last = len(model.layers) - first  # type: ignore[arg-type]
    for layer in model.layers[first:last]:  # type: ignore[index]
        shard(layer)
    return shard(model)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": sharded,
    "half, reduced in float32": partial(sharded, param_dtype=half, reduce_dtype=torch.float32),
    "reduced in half": partial(sharded, reduce_dtype=half),
    "computed again": partial(sharded, partial(Layers, checkpoints=True)),
    "tied": partial(sharded, partial(Layers, tied=True)),
    "partly frozen": partial(sharded, partial(Layers, frozen=True)),
}
HSDP = partial(sharded, shape=(2, 2))
HSDP_IN_HALF = partial(sharded, shape=(2, 2), param_dtype=half, reduce_dtype=torch.float32)


class Loop(Trained):
    """The loop as one writes it."""

    def take(self, seed: int, size: int) -> None:
        rows = rows_of_rank(seed)
        for at in range(0, ROWS, size):
            self.model.set_requires_gradient_sync(at + size == ROWS)  # type: ignore[operator]
            loss, _ = self.forward(collate(rows[at : at + size]))
            loss.backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:  # the mean over ranks, of sums
                parameter.grad.mul_(1 / (ROWS * WIDTH))
        self.optimizer.step()
        self.optimizer.zero_grad()


def rows_of_rank(seed: int) -> list[Any]:
    return rows_of(ROWS, seed=seed * dist.get_world_size() + dist.get_rank())


def trained(model: Callable[[], nn.Module], **settings: Any) -> tuple[Trained, FailingMemory]:
    return failing("fsdp", model=model(), sync_each_batch=False, **settings)


def take(run: Trained, seed: int, size: int) -> Any:
    return run.step(rows_of_rank(seed), collate, size)


# --- the same as plain --------------------------------------------------------------------------------


def wrong_bits(models: dict[str, Callable[[], nn.Module]]) -> list[str]:
    """The models, and sizes of micro-batches, with which weights are not those of the plain loop."""
    wrong = []
    for name, model in models.items():
        for size in (ROWS, ROWS // 2, ROWS // 4):
            plain, (ours, _) = Loop("fsdp", model=model()), trained(model)
            for seed in range(4):
                plain.take(seed, size)
                take(ours, seed, size)
            if not same_bits(local_values(ours.model), local_values(plain.model)):
                wrong.append(f"{name}, {size}")
    return wrong


def test_weights_are_those_of_the_plain_loop_to_the_bit() -> None:
    assert run_ranks(wrong_bits, 2, MODELS) == [[], []]


@pytest.mark.rotating(3)
def test_weights_are_those_of_the_plain_loop_with_copies_of_shards() -> None:
    models = {"hsdp": HSDP, "hsdp in half": HSDP_IN_HALF}
    assert run_ranks(wrong_bits, 4, models) == [[]] * 4


def launched(model: Callable[[], nn.Module], size: int) -> dict[str, Counter[str]]:
    """What a step launches: of the plain loop, and of ours that reduces in the last, and in each."""
    last, each = (Trained("fsdp", model=model(), sync_each_batch=not on) for on in (True, False))
    runs: dict[str, Callable[[int], Any]] = {
        "plain": partial(Loop("fsdp", model=model()).take, size=size),
        "last": partial(take, last, size=size),
        "each": partial(take, each, size=size),
    }
    found = {}
    for name, take_one in runs.items():
        for seed in range(4):  # from the third on, no rank asks another
            with Launches() as launches:
                take_one(seed)
        found[name] = launches.counts
    return found


@pytest.mark.parametrize("size", [ROWS, ROWS // 4])
def test_a_step_launches_what_the_plain_loop_does(size: int) -> None:
    layers, times = 3, ROWS // size
    for found in run_ranks(launched, 2, sharded, size):
        plain, ours, each = (found[name] for name in ("plain", "last", "each"))
        [scatter] = [name for name in plain if "scatter" in name]
        [gather] = [name for name in plain if "gather" in name]
        assert plain[scatter] == ours[scatter] == layers
        assert each[scatter] == layers * times
        assert plain[gather] == ours[gather] == each[gather] > 0


# --- memory runs out ----------------------------------------------------------------------------------


def lost(
    model: Callable[[], nn.Module], accumulation: int, fails_in: int, sample: Sample
) -> tuple[int, list[str]]:
    """The operations that were tried, and those where a loss of memory has another result than smaller
    micro-batches."""
    size = ROWS // accumulation
    plain = Loop("fsdp", model=model())
    for seed in range(fails_in + 2):
        plain.take(seed, size if seed < fails_in else size // 2)
    expected = local_values(plain.model)
    run, memory = trained(model)
    for seed in range(fails_in):
        take(run, seed, size)
    last, _ = survivable(memory, run.step.train_step, lambda: take(run, fails_in, size))
    wrong, tried = [], 0
    for number, _, failure in fail_at_each(sample.of(last), memory, run.step.ranks):
        tried += 1
        run, other = trained(model)
        for seed in range(fails_in):
            take(run, seed, size)
        with failure:
            other.fault = memory.fault
            retried = [take(run, fails_in, size).retried]
            other.fault = None
        retried.append(take(run, fails_in + 1, size).retried)
        if retried != [1, 0]:
            wrong.append(f"{number}: {retried=}")
        if not same_bits(local_values(run.model), expected):
            wrong.append(f"{number}: other weights")
        if changed := fsdp.changed_reduction(run.model):
            wrong.append(f"{number}: {changed}")
    return tried, wrong


STEPS = pytest.mark.parametrize("fails_in", [0, 1, 3], ids=["first step", "second", "fourth"])


@STEPS
@pytest.mark.rotating(3)
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("name", ["plain", "half, reduced in float32"])
def test_memory_may_run_out_anywhere(
    name: str, accumulation: int, fails_in: int, sample: Sample
) -> None:
    sample = sample.every(exhaustive=1, quick=23)
    arguments = (MODELS[name], accumulation, fails_in, sample)
    for tried, wrong in run_ranks(lost, 2, *arguments):
        assert tried and not wrong, wrong


@STEPS
@pytest.mark.rotating
def test_memory_may_run_out_anywhere_with_copies_of_shards(fails_in: int, sample: Sample) -> None:
    sample = sample.every(exhaustive=5, quick=61)
    for tried, wrong in run_ranks(lost, 4, HSDP, 4, fails_in, sample):
        assert tried and not wrong, wrong


# --- what the caller does -----------------------------------------------------------------------------


class OwnError(Exception):
    """Raised by the caller's loss."""


def mishaps() -> None:
    """What a caller may do wrong leaves nothing behind."""
    plain, (run, _) = Loop("fsdp", model=sharded()), trained(sharded)
    step, rows = run.step.train_step, rows_of_rank(0)
    for _ in range(2):
        step.forward_backward(collate(rows))
        with pytest.raises(RuntimeError, match=r"given as the last.*last=True"):
            step.apply()
        for name, parameter in run.model.named_parameters():
            assert parameter.grad is None, name
    plain.take(1, 2)
    take(run, 1, 2)
    own, calls = run.step.objective._forward, []

    def raising(batch: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise OwnError
        return own(batch)

    run.step.objective._forward = raising
    with pytest.raises(OwnError):
        take(run, 2, 2)
    run.step.objective._forward = own
    assert fsdp.changed_reduction(run.model) is None
    plain.take(3, 2)
    take(run, 3, 2)
    assert same_bits(local_values(run.model), local_values(plain.model))
    # What follows in the caller's hands is FSDP as it was.
    run.forward(collate(rows))[0].backward()
    assert all(parameter.grad is not None for parameter in run.model.parameters())


def test_mistakes_leave_nothing_behind() -> None:
    run_ranks(mishaps, 2)


def refused_with_noise() -> str:
    with pytest.raises(UsageError) as refused:
        trained(sharded, measure_noise=True)
    return str(refused.value)


def test_noise_needs_what_is_reduced_in_each_micro_batch() -> None:
    for said in run_ranks(refused_with_noise, 2):
        assert said.startswith("sync_each_batch: False does not go with measure_noise")


def without_shards(way: str) -> bool:
    """Whether the weights after some steps are the same with the option and without."""
    found = []
    for in_last in (True, False):
        run = Trained(way, sync_each_batch=not in_last)
        for seed in range(3):
            take(run, seed, 2)
        found.append(local_values(run.model))
    return same_bits(*found)


@pytest.mark.parametrize(("way", "ranks"), [("alone", 1), ("ddp", 2)])
def test_without_shards_it_changes_nothing(way: str, ranks: int) -> None:
    assert all(run_ranks(without_shards, ranks, way))


# --- memory -------------------------------------------------------------------------------------------


def peaks(in_last: bool) -> tuple[dict[int, int], int]:
    """The peak of steps of so many micro-batches of one row, and of a trial of one row."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.Sequential(nn.Embedding(512, 8), *layers)  # whose gradient comes last
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [torch.arange(2) for _ in range(4)]
    step = AdaptiveStep(
        model,
        optimizer,
        lambda batch: (model(batch).square().sum(), batch.numel()),
        memory_limit="1GiB",
        sync_each_batch=not in_last,
    )
    memory, found = step.train_step.memory, {}
    for _ in range(3):
        step(rows, torch.stack, 1)
    for count in (1, 2, 3, 4):
        memory.watch()
        step(rows[:count], torch.stack, 1)
        found[count] = memory.usage().peak_bytes
    size = find_batch_size(step, lambda n: torch.stack(rows[:n]), ceiling=1, accumulation=4)
    return found, max(report.peak_bytes for trial in size.trials for report in trial.reports)


def test_a_trial_takes_the_memory_of_training() -> None:
    for in_last in (False, True):
        for of_steps, of_trial in run_ranks(peaks, 2, in_last):
            assert of_steps[3] == of_steps[4] == of_trial, of_steps
            assert (of_steps[2] < of_steps[3]) is in_last, of_steps


def test_it_costs_the_memory_of_whole_gradients() -> None:
    whole = 4 * (512 * 8 + 3 * (8 * 8 + 8))
    each, last = (run_ranks(peaks, 2, in_last)[0][0][4] for in_last in (False, True))
    assert 0 < last - each <= whole
