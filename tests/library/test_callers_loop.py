"""Steps inside a loop that clips, steps the optimizer and logs by itself, as trainers do."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.decoder import local_values, same_bits
from tests.helpers.library import WIDTH, Trained, collate, failing, rows_of
from tests.helpers.ranks import run_ranks
from tests.helpers.step_costs import costs_of
from torchtune_adaptive import AdaptiveStep, UsageError, find_batch_size

ROWS = 4


class Shares(Trained):
    """A loop whose loss is a mean over the rows of a step, as transformers' trainer has it."""

    def __init__(self, way: str, **settings: Any) -> None:
        super().__init__(way, **{"shares": True} | settings)

    def forward(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        inputs, targets = batch
        return F.mse_loss(self.model(inputs), targets) * len(inputs) / ROWS

    def take(self, rows: list[Any], size: int) -> Any:
        outcome = self.step(rows, collate, size)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()  # gradients stay, as where a trainer zeroes them before it begins
        return outcome, float(getattr(norm, "full_tensor", lambda: norm)())


class Sums(Shares):
    forward = Trained.forward  # type: ignore[assignment]

    def __init__(self, way: str, **settings: Any) -> None:
        super().__init__(way, **{"shares": False} | settings)


def plain_step(run: Trained, rows: list[Any]) -> float:
    """The same step by hand, on one rank."""
    run.optimizer.zero_grad()
    inputs, targets = collate(rows)
    F.mse_loss(run.model(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.optimizer.step()
    return float(norm)


@pytest.mark.parametrize("kind", [Shares, Sums])
def test_the_caller_clips_and_steps(kind: type[Shares]) -> None:
    run, plain = kind("alone", optimizer_steps=False), Trained("alone")
    for seed in range(3):
        outcome, norm = run.take(rows_of(ROWS, seed), 1)
        inputs, targets = collate(rows_of(ROWS, seed))
        expected = F.mse_loss(plain.model(inputs), targets).item()
        assert outcome.loss == pytest.approx(expected, rel=1e-6)
        assert norm == pytest.approx(plain_step(plain, rows_of(ROWS, seed)), rel=1e-5)
        assert outcome.gradient_norm is None
    for ours, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def steps_on_ranks(way: str, divisor: float | None, fails_on: int | None) -> list[Any]:
    """Losses, norms and weights of three steps; in the second, memory runs out on a rank."""
    run, memory = _failing(way)
    if divisor is not None:
        for module in (run.model, *run.model.children()):
            module.set_gradient_divide_factor(divisor)  # type: ignore[operator]
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has no other
        run, memory = _failing(way, run.model)
    rank, seen = run.step.ranks.rank, []
    for number in range(3):
        with memory.fail_at(9 if number == 1 and rank == fails_on else None):
            outcome, norm = run.take(rows_of(ROWS, 10 * number + rank), 2)
        assert outcome.retried == (number == 1 and fails_on is not None)
        seen.append((outcome.loss, norm))
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in run.model.parameters()]
    return [seen, [tensor.tolist() for tensor in whole]]


def _failing(way: str, model: nn.Module | None = None) -> tuple[Shares, Any]:
    return failing(way, kind=Shares, model=model, optimizer_steps=False)  # type: ignore[return-value]


WAYS = [("fsdp", None), ("fsdp", 1.0), ("fsdp", 4.0), ("ddp", None)]


@pytest.mark.ranks
@pytest.mark.rotating(2)
@pytest.mark.parametrize("fails_on", [None, 1])
@pytest.mark.parametrize(("way", "divisor"), WAYS)
def test_shares_are_averaged_over_ranks(
    way: str, divisor: float | None, fails_on: int | None
) -> None:
    """However gradients are reduced, and whoever runs out of memory."""
    found = run_ranks(steps_on_ranks, 2, way, divisor, fails_on)
    assert found[0] == found[1]
    (seen, weights), plain = found[0], Trained("alone")
    for number, (loss, norm) in enumerate(seen):
        rows = [row for rank in range(2) for row in rows_of(ROWS, 10 * number + rank)]
        inputs, targets = collate(rows)
        expected = F.mse_loss(plain.model(inputs), targets).item()
        assert loss == pytest.approx(expected, rel=1e-6)
        assert norm == pytest.approx(plain_step(plain, rows), rel=1e-5)
    for ours, theirs in zip(weights, plain.model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach())


@pytest.mark.parametrize("kind", [Shares, Sums])
def test_a_search_leaves_the_optimizer_and_what_was_counted(kind: type[Shares]) -> None:
    counts = {"passes": 0}

    class Counting(kind):  # type: ignore[misc, valid-type]
        def forward(self, batch: Any) -> Any:
            counts["passes"] += 1
            return super().forward(batch)

    restored: list[int] = []
    run = Counting(
        "alone",
        optimizer_steps=False,
        memory_limit="1MiB",
        restore=lambda: restored.append(counts["passes"]),
    )
    before = local_values(run.model)
    find_batch_size(run.step, lambda rows: collate(rows_of(rows)), ceiling=8)
    assert same_bits(local_values(run.model), before) and not run.optimizer.state
    assert restored == [counts["passes"]]


def test_what_was_counted_is_set_back_before_each_attempt() -> None:
    counted: list[int] = []

    class Counting(Shares):
        def forward(self, batch: Any) -> Any:
            counted.append(len(batch[0]))
            return super().forward(batch)

    run, memory = failing("alone", kind=Counting, optimizer_steps=False, restore=counted.clear)
    with memory.fail_at(12):
        outcome = run.step(rows_of(ROWS), collate, 2)
    assert outcome.retried == 1 and counted == [1, 1, 1, 1]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.on = inner, False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.on:
            return checkpoint(self.inner, inputs, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(inputs)  # type: ignore[no-any-return]


def relieved(way: str) -> list[Any]:
    """The micro-batches and checkpointing of steps of one row, in the second of which memory runs out."""
    layers: list[Checkpointed] = []

    def switch(on: bool) -> Callable[[], None]:
        return lambda: [setattr(layer, "on", on) for layer in layers] and None

    def wrapped(model: nn.Module) -> nn.Module:
        for layer in model.children():
            layers.append(Checkpointed(layer[0]))  # type: ignore[index]
            layer[0] = layers[-1]  # type: ignore[index]
        return model

    relief = (switch(True), switch(False))
    run, memory = failing(way, wrap=wrapped, activation_checkpointing=relief, grow_back_after=2)
    seen: list[Any] = []
    for number in range(5):
        with memory.fail_at(9 if number == 1 and run.step.ranks.is_zero else None):
            outcome = run.step(rows_of(1, number), collate, 1)
        seen.append((outcome.loss, outcome.retried, all(layer.on for layer in layers)))
    return seen


def test_checkpointing_comes_before_smaller_micro_batches() -> None:
    seen = relieved("alone")
    assert [retried for _, retried, _ in seen] == [0, 1, 0, 0, 0]
    assert [on for _, _, on in seen] == [False, True, False, False, False]
    plain = Trained("alone")
    losses = [plain.step(rows_of(1, number), collate, 1).loss for number in range(5)]
    assert [loss for loss, _, _ in seen] == losses


def test_checkpointing_stays_where_memory_is_lost_again() -> None:
    layer, attempts = Checkpointed(nn.Linear(WIDTH, WIDTH)), []

    def forward(batch: Any) -> tuple[torch.Tensor, int]:
        attempts.append(layer.on)
        if len(attempts) <= 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return layer(batch[0]).square().sum(), len(batch[0])

    relief = (lambda: setattr(layer, "on", True), lambda: setattr(layer, "on", False))
    optimizer = torch.optim.SGD(layer.parameters())
    step = AdaptiveStep(layer, optimizer, forward, activation_checkpointing=relief)
    assert step(rows_of(2), collate, 2).micro_batch == 1
    assert attempts == [False, True, True, True]


@pytest.mark.ranks
def test_all_ranks_checkpoint_alike() -> None:
    one, other = run_ranks(relieved, 2, "fsdp")
    assert one == other
    assert [on for _, _, on in one] == [False, True, False, False, False]


def without_relief(way: str, fails_on: tuple[int, ...], stage: str) -> list[Any]:
    """Steps of a model that cannot be checkpointed, in the second of which memory runs out on a rank; some
    ranks then raise an error in a stage."""
    switched = [False]
    relief = (lambda: switched.append(True), lambda: switched.append(False))

    def hook(*_: Any) -> None:
        if switched[-1] and rank in fails_on:
            raise RuntimeError("sizes do not match")

    run, memory = failing(way, activation_checkpointing=relief, grow_back_after=3)
    rank, seen = run.step.ranks.rank, []
    layer = run.model[1] if way != "ddp" else run.model.module[1]  # type: ignore[index, union-attr]
    if stage == "forward":
        layer.register_forward_pre_hook(hook)
    else:
        layer.register_forward_hook(lambda _, __, output: output.register_hook(hook) and None)
    for number in range(6):
        with memory.fail_at(9 if number == 1 and rank == 0 else None):
            outcome = run.step(rows_of(ROWS, number), collate, ROWS)
        seen.append((outcome.loss, outcome.retried, outcome.micro_batch))
    assert switched == [False, True, False]  # and never again
    return seen


def is_halved_instead(seen: list[Any]) -> None:
    assert [retried for _, retried, _ in seen] == [0, 2, 0, 0, 0, 0]
    assert [size for *_, size in seen] == [4, 2, 2, 2, 4, 4]


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_model_that_cannot_be_checkpointed_is_taken_in_smaller_micro_batches(
    stage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "propagate", True)
    seen = without_relief("alone", (0,), stage)
    is_halved_instead(seen)
    plain = Trained("alone")
    losses = [plain.step(rows_of(ROWS, number), collate, ROWS).loss for number in range(6)]
    assert [loss for loss, *_ in seen] == pytest.approx(losses, rel=1e-6)
    assert [record.message for record in caplog.records][:2] == [
        "activation checkpointing none -> all (out of memory in backward on rank 0, step 2)",
        "micro-batch 4 -> 2, activation checkpointing all -> none (RuntimeError: sizes do not match in "
        f"{stage} on rank 0, step 2)",
    ]


@pytest.mark.ranks
@pytest.mark.rotating(2)
@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
@pytest.mark.parametrize("fails_on", [(0, 1), (1,)], ids=["all", "one"])
def test_ranks_that_cannot_be_checkpointed_agree(
    fails_on: tuple[int, ...], way: str, stage: str
) -> None:
    """Whether all raise the error or one does, in the first steps, whose collectives are recorded."""
    one, other = run_ranks(without_relief, 2, way, fails_on, stage)
    assert one == other
    is_halved_instead(one)


def test_other_errors_end_as_before() -> None:
    """Of ours, and those of a step without it; and once it works, all."""
    layers = (lambda: None, lambda: None)
    run, memory = failing("alone", activation_checkpointing=layers)
    with memory.fail_at(9):
        assert run.step(rows_of(ROWS), collate, ROWS).retried == 1
    right, wrong = run.step.objective._forward, lambda batch: 1 / 0
    run.step.objective._forward = wrong
    with pytest.raises(ZeroDivisionError):
        run.step(rows_of(ROWS), collate, ROWS)
    run.step.objective._forward = right
    assert run.step(rows_of(ROWS), collate, ROWS).micro_batch == ROWS


class TestMisuse:
    @pytest.mark.parametrize("functions", [3, (print,), (print, 3), print, [print, print]])
    def test_activation_checkpointing(self, functions: Any) -> None:
        with pytest.raises(UsageError, match=r"^activation_checkpointing: .* is not two functions"):
            Trained("alone", activation_checkpointing=functions)

    def test_restore(self) -> None:
        with pytest.raises(UsageError, match=r"^restore: 3 is not a function"):
            Trained("alone", restore=3)

    @pytest.mark.parametrize("mesh", [2, "cp"])
    def test_context_mesh(self, mesh: Any) -> None:
        with pytest.raises(UsageError, match=r"^context_mesh: .* is not a mesh of one dimension"):
            Trained("alone", context_mesh=mesh)

    @pytest.mark.parametrize(
        "theirs", [{"max_grad_norm": 1.0}, {"scaler": torch.amp.GradScaler("cpu")}]
    )
    def test_what_the_caller_does(self, theirs: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=r"^optimizer_steps: False leaves clipping"):
            Trained("alone", optimizer_steps=False, **theirs)

    def test_noise_of_shares(self) -> None:
        with pytest.raises(UsageError, match=r"^measure_noise: not with shares of the loss"):
            Shares("alone", measure_noise=True)

    def test_a_sum_where_shares_were_announced(self) -> None:
        with pytest.raises(UsageError, match="returned 2 values, but with shares must return one"):
            Sums("alone", shares=True).step(rows_of(2), collate, 1)

    def test_a_value_of_shares(self) -> None:
        with pytest.raises(UsageError, match=r"^shares: 'yes' must be one of"):
            Trained("alone", shares="yes")

    @pytest.mark.parametrize(
        "take",
        [
            lambda step: step(rows_of(8), collate, 2),
            lambda step: find_batch_size(step, lambda rows: collate(rows_of(rows))),
        ],
        ids=["step", "search"],
    )
    def test_a_bare_mean(self, take: Callable[[AdaptiveStep], Any]) -> None:
        """The first thing that comes to mind; added up, it would give too large a gradient."""
        run = Shares("alone", shares=False, memory_limit="1MiB")
        before = local_values(run.model)
        why = r"^forward: returned a tensor .* return \(mean \* terms, terms\)"
        with pytest.raises(UsageError, match=why):
            take(run.step)
        assert same_bits(local_values(run.model), before)


class TestSearch:
    """Functions that are right, and that a search took for wrong."""

    def find(self, forward: Any, batch: Any, width: int = WIDTH) -> int:
        run = Trained("alone", width=width, memory_limit="1MiB")
        run.step.objective._forward = lambda inputs: forward(run.model, inputs)
        return int(find_batch_size(run.step, batch, ceiling=8))

    def test_a_negative_loss(self) -> None:
        forward = lambda model, batch: (-model(batch[0]).square().sum(), batch[0].numel())  # noqa: E731
        assert self.find(forward, lambda rows: collate(rows_of(rows))) == 8

    def test_a_mapping_that_torch_does_not_know(self) -> None:
        """As transformers' tokenizers return, whose ``to`` changes them in place."""
        made = []

        def batch(rows: int) -> UserDict[str, torch.Tensor]:
            made.append(UserDict(inputs=collate(rows_of(rows))[0]))
            return made[-1]

        forward = lambda model, batch: (model(batch["inputs"]).square().sum(), 1)  # noqa: E731
        assert self.find(forward, batch) == 8

    def test_rows_that_are_strung_together(self) -> None:
        def batch(rows: int) -> dict[str, torch.Tensor]:
            ends = torch.arange(rows + 1) * 3  # one more than rows
            return {"inputs": torch.zeros(3 * rows, WIDTH), "ends": ends}

        forward = lambda model, batch: (model(batch["inputs"]).square().sum(), 1)  # noqa: E731
        assert self.find(forward, batch) == 8


class Gathers(Shares):
    """A loss that tells other ranks about its rows, once before the model runs and once after it."""

    def forward(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        before = self._counted(len(batch[0]))
        loss = super().forward(batch)
        assert self._counted(len(batch[0])) == before
        return loss

    def _counted(self, rows: int) -> int:
        count = torch.tensor(rows)
        self.step.collective(dist.all_reduce, count)
        self.step.collective(_deal_out)
        gather = self.step.train_step.collectives.gather
        assert len(gather(_gathered, torch.ones(rows, 2))) == dist.get_world_size() * rows
        numbers = gather(_gathered, count)
        assert (
            len(numbers) == dist.get_world_size() and numbers.all()
        )  # nothing of a rank that failed
        return int(count)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of each rank, as accelerate gathers it, with memory of its own."""
    tensor = tensor.clone()[None] if tensor.ndim == 0 else tensor
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return torch.cat(rows)


def _deal_out() -> None:
    """Send parts of different sizes to two ranks."""
    sent, received = ([1, 2], [1, 3]) if dist.get_rank() == 0 else ([3, 4], [2, 4])
    output, given = torch.empty(sum(received)), torch.ones(sum(sent))
    dist.all_to_all_single(output, given, received, sent)


def gathering(way: str, fails: dict[int, tuple[int, int]]) -> list[float]:
    """The losses of some steps, in each of which memory runs out on a rank at an operation."""
    run, memory = failing(way, kind=Gathers, optimizer_steps=False)
    rank, losses = run.step.ranks.rank, []
    for number in range(5):
        on, operation = fails.get(number, (None, 0))
        with memory.fail_at(operation if on == rank else None):
            outcome, _ = run.take(rows_of(ROWS, 10 * number + rank), ROWS)  # type: ignore[attr-defined]
        assert outcome.retried == (number in fails)
        losses.append(outcome.loss)
    assert not run.step.train_step.collectives.recording
    return losses


def beside_an_undisturbed_run(way: str, operations: list[int]) -> None:
    undisturbed = gathering(way, {})
    for operation in operations:
        fails = {0: (1, operation), 3: (0, operation)}
        assert gathering(way, fails) == pytest.approx(undisturbed, rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_no_rank_waits_in_what_forward_gathers(way: str, exhaustive: bool) -> None:
    """While the sequence of collectives is recorded, and afterward."""
    operations = list(range(1, 40)) if exhaustive else [3, 9, 10, 14, 24, 26]
    run_ranks(beside_an_undisturbed_run, 2, way, operations)


class GathersNumbers(Shares):
    """A loss that tells other ranks a number of each kind, as metrics are."""

    def forward(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        gather = self.step.train_step.collectives.gather
        numbers = [torch.tensor(value) for value in (3, 0.25, True)]
        for number in (*numbers, torch.tensor(0.5, dtype=torch.bfloat16)):
            gathered = gather(_gathered, number)
            assert gathered.dtype == number.dtype and gathered.tolist() == [number.item()] * 2
        return super().forward(batch)


def exchanges_on_the_host() -> int:
    run = GathersNumbers("ddp", optimizer_steps=False)
    for _ in range(2):  # the first ones are recorded
        run.take(rows_of(ROWS), 1)
    return costs_of(lambda: run.take(rows_of(ROWS), 1)).agreements


@pytest.mark.ranks
def test_numbers_are_gathered_without_a_vote() -> None:
    """Four numbers of each of four micro-batches: the one exchange of a step tells what ranks were called
    with."""
    assert run_ranks(exchanges_on_the_host, 2) == [1, 1]


def test_on_one_rank_a_collective_is_a_call() -> None:
    run = Shares("alone", optimizer_steps=False)
    assert run.step.collective(max, 1, 2) == 2


class Freezes(Sums):
    """A loss with a reference: the same model, some of whose weights are frozen meanwhile, as PEFT has it."""

    def forward(self, batch: Any) -> Any:
        inputs, targets = batch
        outputs = self.model(inputs)
        with torch.no_grad():
            self.model[0].requires_grad_(False)  # type: ignore[index]
            try:
                reference = self.model(inputs)
            finally:
                self.model[0].requires_grad_(True)  # type: ignore[index]
        return F.mse_loss(outputs, targets + reference, reduction="sum"), targets.numel()


def weights_after_freezing(operation: int | None) -> tuple[bool, list[torch.Tensor]]:
    """Whether a step was retried in which a rank fails, and the weights some steps later."""
    run, memory = failing("fsdp", kind=Freezes, optimizer_steps=False)
    rank, retried = run.step.ranks.rank, False
    for number in range(6):
        with memory.fail_at(operation if rank == 0 and number == 3 else None):
            outcome, _ = run.take(rows_of(ROWS, 10 * number + rank), ROWS)  # type: ignore[attr-defined]
        retried |= bool(outcome.retried)
    return retried, local_values(run.model)


def frozen_while_it_fails(operations: list[int]) -> int:
    _, expected = weights_after_freezing(None)
    lost = 0
    for operation in operations:
        retried, weights = weights_after_freezing(operation)
        lost += retried
        torch.testing.assert_close(weights, expected)
    return lost


@pytest.mark.ranks
def test_what_is_frozen_while_memory_runs_out_is_trained_afterward(exhaustive: bool) -> None:
    operations = list(range(1, 40)) if exhaustive else list(range(12, 24, 3))
    for lost in run_ranks(frozen_while_it_fails, 2, operations):
        assert lost >= 4
