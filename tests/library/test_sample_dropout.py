"""Dropout by sample in the library: the same whatever the ranks, the micro-batches and the retries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.faults import survivable
from tests.helpers.library import WIDTH, Row, Trained, collate, failing, rows_of
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive import LayerCheckpointing, UsageError, find_batch_size, steps_of
from torchtune_adaptive.core.step.sample_dropout import SampleDropout, _named, drop_by_sample
from torchtune_adaptive.core.step.snapshot import Snapshot

DATA = 30
BY_SAMPLE: dict[str, Any] = {"dropout": "sample", "seed": 3}


class Layer(nn.Module):
    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(share)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.dropout(F.gelu(self.linear(rows)))
        return result


def model(way: str = "alone", layer: Callable[[], nn.Module] = Layer) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(layer(), layer(), nn.Linear(WIDTH, WIDTH))
    if way == "ddp":
        return DistributedDataParallel(made)
    if way == "fsdp":
        for part in (*made, made):
            fully_shard(part)
    return made


def weights(run: Trained) -> list[float]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in run.model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole]).tolist()


def trained(
    way: str = "alone",
    size: int = 64,
    global_rows: int = 10,
    settings: dict[str, Any] = BY_SAMPLE,
    lengths: bool = False,
) -> list[float]:
    """The weights after the steps of an epoch; torch's own generators are different each time."""
    run = Trained(way, model=model(way), **settings)
    torch.manual_seed(hash((way, size)) % 1000)
    steps = steps_of(rows_of(DATA), global_rows=global_rows)
    for rows in steps:
        given = [1 + number % 3 for number in range(len(rows))] if lengths else None
        run.step(rows, collate, size * (3 if lengths else 1), given)
    return weights(run)


def close(one: list[float], other: list[float]) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 10])
def test_micro_batches_change_no_mask(size: int) -> None:
    assert close(trained(size=size), trained())
    assert close(trained(size=size, lengths=True), trained())
    assert not close(trained(size=size, settings={}), trained(settings={}))
    assert not close(trained(settings=BY_SAMPLE | {"seed": 4}), trained())


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("global_rows", [9, 10])
def test_ranks_change_no_mask(way: str, global_rows: int) -> None:
    """With 9 rows in a step, ranks take turns to have one more."""
    found = run_ranks(trained, 2, way, 2, global_rows)
    assert found[0] == found[1]
    assert close(found[0], trained(global_rows=global_rows))


def dealt(way: str, named: bool) -> list[float]:
    """Steps of lists of rows, in which each rank has the next ones in turn, or the next four."""
    run = Trained(way, model=model(way), **BY_SAMPLE)
    torch.manual_seed(dist.get_rank())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for seed in range(2):
        rows = rows_of(8, seed)
        mine = range(8)[rank * 8 // ranks : (rank + 1) * 8 // ranks]
        if named:
            run.step([rows[n] for n in mine], collate, 3, numbers=mine)
        else:
            run.step(rows[rank::ranks], collate, 3)
    return weights(run)


@pytest.mark.ranks
def test_rows_that_others_deal_out_have_numbers() -> None:
    [alone] = run_ranks(dealt, 1, "alone", False)
    for named in (False, True):
        assert all(close(found, alone) for found in run_ranks(dealt, 2, "ddp", named))


def test_rows_that_the_caller_adds_have_numbers_as_well() -> None:
    run = Trained("alone", model=model(), **BY_SAMPLE)
    plain = Trained("alone", model=model(), **BY_SAMPLE)
    rows = next(steps_of(rows_of(DATA), 4))
    rows.append(rows[0])
    run.step(rows, collate, 5)
    plain.step([*rows], collate, 5)
    assert weights(run) == weights(plain)


def test_a_retry_has_the_same_masks(sample: Sample) -> None:
    rows = rows_of(4)
    run, memory = failing("alone", model=model(), **BY_SAMPLE)
    run.step(rows, collate, 4)
    before = Snapshot(run.model, [run.optimizer], torch.device("cpu"))
    run.step.steps = 0
    run.step(rows, collate, 2)
    expected = weights(run)
    last, _ = survivable(memory, run.step.train_step, lambda: run.step(rows, collate, 4))
    for operation in sample.of(last):
        before.restore()
        run.step._begin(4)
        run.step.steps = 0
        with memory.fail_at(operation):
            outcome = run.step(rows, collate, 4)
        assert (outcome.retried, outcome.micro_batch) == (1, 2)
        assert weights(run) == expected


def test_checkpointing_changes_no_bit() -> None:
    def checkpointed(layers: int) -> list[float]:
        made = model()
        switch = LayerCheckpointing([*made][:2])
        run = Trained("alone", model=made, activation_checkpointing=switch, **BY_SAMPLE)
        run.step.checkpoint_layers(layers)
        for seed in range(2):
            run.step(rows_of(6, seed), collate, 2)
        return weights(run)

    assert checkpointed(0) == checkpointed(1) == checkpointed(2)


def test_a_run_that_goes_on_has_the_masks_that_would_have_followed() -> None:
    def step(run: Trained, seed: int) -> None:
        run.step(rows_of(6, seed), collate, 2)

    whole = Trained("alone", model=model(), **BY_SAMPLE)
    step(whole, 0)
    parts = (whole.model, whole.optimizer, whole.step)
    saved = [copy.deepcopy(part.state_dict()) for part in parts]  # type: ignore[attr-defined]
    other = Trained("alone", model=model(), **BY_SAMPLE)
    for part, state in zip((other.model, other.optimizer, other.step), saved, strict=True):
        part.load_state_dict(state)  # type: ignore[arg-type]
    torch.manual_seed(5)
    step(whole, 1), step(other, 1)
    assert weights(whole) == weights(other)


def test_a_search_leaves_no_trace() -> None:
    searched = Trained("alone", model=model(), memory_limit="1MiB", **BY_SAMPLE)
    plain = Trained("alone", model=model(), **BY_SAMPLE)
    drawn = torch.get_rng_state()
    find_batch_size(searched.step, lambda size: collate(rows_of(size)), ceiling=8)
    assert torch.equal(torch.get_rng_state(), drawn)
    for run in (searched, plain):
        run.step(rows_of(6), collate, 2)
    assert weights(searched) == weights(plain)


class Pairs(Trained):
    """A program whose rows are two sequences: the model gets the first ones of all rows, then the others."""

    def forward(self, batch: Row) -> tuple[torch.Tensor, int]:
        outputs = self.model(torch.cat(batch))
        return outputs.square().sum(), len(batch[0])


def test_sequences_of_a_row_have_masks_of_their_own() -> None:
    def of(size: int) -> list[float]:
        run = Pairs("alone", model=model(), sequences=2, **BY_SAMPLE)
        run.step(rows_of(6), collate, size)
        return weights(run)

    assert close(of(6), of(1))
    with pytest.raises(UsageError, match="the 6 rows"):
        Pairs("alone", model=model(), **BY_SAMPLE).step(rows_of(6), collate, 6)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.linear(rows)[:, None, :, None] * rows[:, None, None, :]
        result: torch.Tensor = self.dropout(scores).sum((1, 3))
        return result


class Functional(Layer):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(rows), 0.5)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Attention, r"a 2 x 1 x 4 x 4 tensor, as inside of attention"),
        (Functional, "in other ways than by nn.Dropout"),
        (lambda: Functional(0.0), "in other ways than by nn.Dropout"),
    ],
)
def test_what_cannot_belong_to_rows_is_refused_in_the_first_step(
    layer: Callable[[], nn.Module], said: str
) -> None:
    run = Trained("alone", model=model(layer=layer), **BY_SAMPLE)
    with pytest.raises(UsageError, match=said):
        run.step(rows_of(4), collate, 2)


def test_what_is_refused_at_once_changes_no_model() -> None:
    made = model()
    made.append(nn.Dropout2d(0.1))
    with pytest.raises(UsageError, match=r"3 \(Dropout2d\): its random numbers"):
        Trained("alone", model=made, **BY_SAMPLE)
    assert not any(isinstance(each, SampleDropout) for each in made.modules())


@pytest.mark.parametrize(
    ("numbers", "said"),
    [([0, 1], "2 different ones for 4 rows"), ([0, 1, 1, 2], "3 different"), (4, "a int is not")],
)
def test_numbers_are_of_rows(numbers: Any, said: str) -> None:
    run = Trained("alone", model=model(), **BY_SAMPLE)
    with pytest.raises(UsageError, match=said):
        run.step(rows_of(4), collate, 2, numbers=numbers)


def test_a_model_drops_as_torch_does_where_a_later_step_says_so() -> None:
    made = model().eval()
    for dropout, kind in (
        ("sample", SampleDropout),
        ("sample", SampleDropout),
        ("torch", nn.Dropout),
    ):
        Trained("alone", model=made, dropout=dropout)
        layers = [each for each in made.modules() if isinstance(each, nn.Dropout)]
        assert {type(each) for each in layers} == {kind}
        assert not any(each.training for each in layers)
        assert [each.p for each in layers] == [0.5, 0.5]


def split_rows() -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(UsageError) as caught:
        Trained("ddp", model=model("ddp"), context_mesh=mesh, **BY_SAMPLE)
    return str(caught.value)


@pytest.mark.ranks
def test_rows_that_are_split_over_ranks_are_refused() -> None:
    assert "split over ranks" in run_ranks(split_rows, 2)[0]


def compiled_names(way: str) -> list[str]:
    made = model(way)
    if way == "compiled":
        made = torch.compile(made, backend="eager")  # type: ignore[assignment]
    drop_by_sample(made, compiled=False)
    return [name for name, _ in _named(made)]


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["ddp", "fsdp", "compiled"])
def test_names_of_layers_do_not_depend_on_wrappers(way: str) -> None:
    assert run_ranks(compiled_names, 1, way) == [["0.dropout", "1.dropout"]]
