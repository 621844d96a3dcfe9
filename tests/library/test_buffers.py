"""Buffers and plain attributes of modules are as if memory had never run out, and nobody had searched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.helpers.faults import survivable
from tests.helpers.library import WIDTH, Row, Trained, collate, failing, rows_of, tiny_model
from tests.helpers.ranks import run_ranks
from torchtune_adaptive import find_batch_size
from torchtune_adaptive.core.step import buffers

ROWS = 8


class Changing(nn.Module):
    """A layer that changes all that a forward pass may: running statistics, a buffer that is replaced as
    dynamic RoPE's is, one that counts without a version, and attributes. What it computes follows them."""

    def __init__(self, inner: nn.Module, keeps_rows: bool = True) -> None:
        super().__init__()
        # Of these two, one row is enough.
        norms = {True: nn.BatchNorm1d, False: nn.InstanceNorm1d}
        self.inner, self.norm = inner, norms[keeps_rows](2, affine=True, track_running_stats=True)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("seen", torch.zeros(()))
        self.longest: Any = 0
        self.passes, self.checkpoints = 0, False
        self.seen_by_hook = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.checkpoints and torch.is_grad_enabled():
            return checkpoint(self.layer, rows, use_reentrant=False)
        return self.layer(rows)

    def layer(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.data += len(rows)
            if (length := rows.abs().max()) > self.longest:
                self.longest = length
                self.register_buffer("scale", 1 + self.longest / 10, persistent=False)
        self.passes += 1
        self.cache = self.passes  # an attribute that is new in the first pass
        # transformers adds hooks when they are needed first.
        if not getattr(self.norm, "is_hooked", False):
            self.norm.register_forward_hook(self.hook)
            self.norm.is_hooked = True
        normed = self.norm((self.inner(rows) * self.scale).view(-1, 2, WIDTH // 2))
        return normed.view_as(rows)

    def hook(self, *_: Any) -> None:
        self.seen_by_hook += 1

    @property
    def state(self) -> list[Any]:
        tensors = [*self.buffers(), torch.as_tensor(self.longest)]
        counted = self.passes, self.seen_by_hook
        return [*(each.tolist() for each in tensors), counted, hasattr(self, "cache")]


class Run(Trained):
    """A program with such a layer, which may be checkpointed, and such a teacher."""

    def __init__(self, way: str, relieves: bool = False, **settings: Any) -> None:
        self.keeps_rows = relieves  # as BatchNorm does where memory runs out
        self.teacher = Changing(nn.Identity()).requires_grad_(False)
        if relieves:
            settings["activation_checkpointing"] = (
                partial(self.switch, True),
                partial(self.switch, False),
            )
        if way == "ddp":
            model = self.wrapped(tiny_model("alone"))
            settings["model"] = DistributedDataParallel(model, broadcast_buffers=False)
        super().__init__(way, wrap=self.wrapped, frozen=[self.teacher], **settings)
        self.score = self.step.forward_only(lambda batch: self.model(batch[0])[:, 0])

    def wrapped(self, model: nn.Module) -> nn.Module:
        first, last = model.children()
        self.changing = Changing(first, self.keeps_rows)
        return nn.Sequential(self.changing, last)

    def switch(self, on: bool) -> None:
        self.changing.checkpoints = on

    def forward(self, batch: Row) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        return super().forward((inputs, self.teacher(targets)))

    def rows(self, number: int) -> list[Row]:
        return rows_of(ROWS, seed=10 * number + self.step.ranks.rank)

    def take(self, number: int, size: int = ROWS // 2) -> tuple[float, list[Any], list[Any]]:
        loss = self.step(self.rows(number), collate, size).loss
        return loss, self.changing.state, self.teacher.state


def after_failures(way: str, relieves: bool, tries: int) -> tuple[int, list[Any]]:
    """How often memory ran out in a step, on one rank, at so many operations; and where the losses or buffers
    of that step or of a later one are not those of a run in which it does not."""
    counted, memory = failing(way, Run, relieves=relieves)
    for number in range(2):
        counted.take(number)  # type: ignore[attr-defined]
    last, _ = survivable(memory, counted.step.train_step, lambda: counted.take(2))  # type: ignore[attr-defined]
    ranks, wrong, retried = counted.step.ranks, [], 0
    last = min(ranks.gather(last))
    operations = [*range(1, last, last // tries | 1)]  # ranks take turns
    for failing_step in (0, 3) if ranks.size > 1 else (0, 1, 3):  # what changes is known after two
        plain, less = Run(way, relieves), ROWS // 2 if relieves else ROWS // 4
        sizes = [ROWS // 2 if number < failing_step else less for number in range(failing_step + 2)]
        expected = [plain.take(*each) for each in enumerate(sizes)]
        for operation in operations:
            run, memory = failing(way, Run, relieves=relieves)
            assert isinstance(run, Run)
            for number, undisturbed in enumerate(expected):
                here = number == failing_step and operation % ranks.size == ranks.rank
                with memory.fail_at(operation) if here else nullcontext():
                    found = run.take(number)
                if found != undisturbed:
                    wrong.append((failing_step, operation, number, found, undisturbed))
            retried += run.step.retried_steps
            if run.changing.checkpoints != (relieves and run.step.retried_steps == 1):
                wrong.append((failing_step, operation, "checkpoints"))
    return retried, wrong


@pytest.mark.parametrize("relieves", [True, False], ids=["checkpointed", "smaller"])
def test_a_retried_step_changes_buffers_once(relieves: bool) -> None:
    retried, wrong = after_failures("alone", relieves, tries=5)
    assert retried > 10 and not wrong


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_so_it_does_where_one_of_two_ranks_runs_out_of_memory(way: str) -> None:
    for retried, wrong in run_ranks(after_failures, 2, way, way == "fsdp", 2):
        assert retried > 3 and not wrong


def test_checkpointing_changes_buffers_once_until_it_is_off_again() -> None:
    plain = Run("alone", relieves=True)
    run, memory = failing("alone", Run, relieves=True, grow_back_after=3)
    assert isinstance(run, Run)
    for number in range(6):
        with memory.fail_at(3) if number == 2 else nullcontext():
            assert run.take(number) == plain.take(number)
        assert run.changing.checkpoints == (2 <= number < 4)


def test_a_search_leaves_no_trace() -> None:
    plain, run = Run("alone"), Run("alone", memory_limit="1GiB")
    before = run.changing.state, run.teacher.state
    size = find_batch_size(run.step, lambda rows: collate(rows_of(1) * rows), ceiling=4)
    assert size == 4 and (run.changing.state, run.teacher.state) == before
    assert [run.take(number) for number in range(3)] == [plain.take(number) for number in range(3)]


@pytest.mark.parametrize("seen_before", [0, 3])
def test_a_phase_without_gradients_that_is_done_again_changes_buffers_once(
    seen_before: int,
) -> None:
    plain, (run, memory) = Run("alone"), failing("alone", Run)
    assert isinstance(run, Run)
    for number in range(seen_before):
        assert run.score(run.rows(number), collate, 2) == plain.score(run.rows(number), collate, 2)
    with memory.fail_at(4):
        found = run.score(run.rows(9), collate, 4)
    assert found == plain.score(run.rows(9), collate, 2)
    assert run.changing.state == plain.changing.state


def of_unequal_rows() -> list[int]:
    """The passes that have counted on a rank that has fewer rows than the other one, or more."""
    run = Run("fsdp", relieves=True)
    for number in range(4):
        run.step(run.rows(number)[: 4 * (1 + run.step.ranks.rank)], collate, 2)
    return [run.changing.passes, int(run.changing.norm.num_batches_tracked)]


@pytest.mark.ranks
def test_a_row_that_is_run_again_beside_other_ranks_does_not_count() -> None:
    assert run_ranks(of_unequal_rows, 2) == [[8, 8], [16, 16]]


class Copies(TorchDispatchMode):
    """Counts copies of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        return func(*args, **(kwargs or {}))


class Constant(nn.Module):
    """A layer with a buffer that never changes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("one", torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows) * self.one


@pytest.mark.parametrize(
    ("kind", "looked_at", "copied"),
    [(nn.Sequential, 0, 0), (Constant, 1, 0), (nn.BatchNorm1d, 1, 3)],
)
def test_a_step_pays_only_for_buffers_that_change(
    kind: Callable[..., nn.Module], looked_at: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        return nn.Sequential(model, kind(WIDTH)) if kind is nn.BatchNorm1d else kind(model)

    run, looks = Trained("alone", wrap=wrap), []
    for _ in range(3):
        run.step(rows_of(4), collate, 4)
    keep = buffers._Module.keep
    monkeypatch.setattr(buffers._Module, "keep", lambda *of, **how: looks.append(keep(*of, **how)))
    monkeypatch.setattr(
        nn.Module, "modules", lambda self: pytest.fail("a walk through the modules")
    )
    with Copies() as copies:
        run.step.train_step.kept_buffers("step")
    assert (len(looks), copies.number) == (looked_at, copied)
    run.step(rows_of(4), collate, 4)
    assert len(looks) == 2 * looked_at


def test_no_memory_is_kept_for_what_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_OF_WEIGHTS", 64)
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Module())
    model[1].register_buffer("rotary", torch.ones(4))
    model[1].register_buffer("packed", torch.ones(64, dtype=torch.uint8))
    kept = buffers.Buffers(model)
    copies = lambda: sum(len(each._copies) for each in kept._modules)  # noqa: E731
    assert copies() == 4  # statistics, the number of batches, and what may change; no weights
    for _ in range(2):
        kept.keep()
        model[0](torch.randn(2, WIDTH))
        kept.learn()
    assert copies() == 3
    kept.keep()
    model[0](torch.randn(2, WIDTH))
    kept.restore()
    assert int(model[0].num_batches_tracked) == 2
