"""A training step that survives running out of memory, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchtune_adaptive.common import UsageError, amount_of_memory
from torchtune_adaptive.core import (
    ByRows,
    Computed,
    LossScale,
    MicroBatch,
    NoiseSums,
    Ranks,
    Recovery,
    Split,
    StepOptions,
    StepRunner,
    TrainStep,
    device_memory,
)
from torchtune_adaptive.library import usage as checks
from torchtune_adaptive.library.summed_loss import SummedLoss

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a step did; the same on every rank."""

    loss: float
    """The mean loss of the step over all ranks, before the optimizer changed the weights."""
    weight: int
    """The number of terms in the loss, over all ranks."""
    gradient_norm: float | None
    """With ``max_grad_norm``: the norm of the whole gradient before clipping."""
    micro_batch: int
    """The rows in a micro-batch, as the step went through."""
    retried: int
    """How often the step was done again because memory ran out on some rank."""
    allocation_retries: int
    """How often the allocators of all ranks had to free cached memory to go on."""
    overflow: bool
    """With a ``scaler``: the gradient overflowed, so the optimizer did not step."""
    noise: NoiseSums | None
    """With ``measure_noise``: what the step adds to a ``NoiseScale``."""


class AdaptiveStep:
    """One optimizer step over any number of micro-batches; retried in smaller ones when memory runs out.

    The model may be on a single device, sharded by ``fully_shard`` (on a mesh of one dimension, or HSDP on
    one of two), or wrapped in ``DistributedDataParallel``. When memory runs out on one rank, all ranks
    discard the step and do it again, with the same rows in smaller micro-batches; no rank is left waiting.
    Gradients are summed over micro-batches and ranks and divided once, by the weight of all, so the split
    never changes the math.

        step = AdaptiveStep(model, optimizer, forward=summed_loss)
        size = find_batch_size(step, batch=worst_case)
        for rows in steps_of(data, size):
            outcome = step(rows, collate, size)

    Args:
        model: the model that is trained.
        optimizer: over the model's parameters; created after ``fully_shard``.
        forward: called with a micro-batch on the device. Returns the loss, summed over its terms (tokens,
            rows, ...), and their number; if that is a tensor on the device, the host waits for it.
        max_grad_norm: the norm above which gradients are scaled down.
        scaler: scales losses against underflow in float16; it is kept up to date.
        memory_limit: the most capacity that this process may have, such as ``"24GiB"``. On a CPU, the tensors
            of a step are counted against it.
        grow_back_after: steps without trouble after which a size that failed is tried again; None: never.
        measure_noise: measure the gradient noise, with one more norm of each micro-batch's gradient.
        frozen: sharded models that ``forward`` runs besides, such as a teacher.
        compiled: whether ``forward`` runs compiled code; by default, whether the model is compiled.
        wait_for_memory: seconds to wait, in all, where not even one row fits: another process may be the
            cause.
        timeout: seconds that a rank may take to answer the others.

    Raises:
        UsageError: these do not work together; nothing has run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        forward: Callable[[Any], tuple[torch.Tensor, int]],
        *,
        max_grad_norm: float | None = None,
        scaler: GradScaler | None = None,
        memory_limit: int | str | None = None,
        grow_back_after: int | None = 100,
        measure_noise: bool = False,
        frozen: Sequence[nn.Module] = (),
        compiled: bool | None = None,
        wait_for_memory: float = 0.0,
        timeout: float = 45.0,
    ) -> None:
        optimizer = checks.plain_optimizer(optimizer)
        checks.require_trainable(model, optimizer)
        if scaler is not None and measure_noise:
            raise UsageError(
                "measure_noise: not with a scaler, whose scale changes from step to step."
            )
        self.ranks = Ranks(timeout)
        checks.require_supported(model, self.ranks)
        self.compiled = checks.is_compiled(model) if compiled is None else compiled
        limit = None if memory_limit is None else amount_of_memory("memory_limit", memory_limit)
        device = checks.device_of(model)
        self.train_step = TrainStep(
            model=model,
            objective=SummedLoss(forward, frozen),
            optimizers=[optimizer],
            device=device,
            memory=device_memory(device, limit),
            ranks=self.ranks,
            options=StepOptions(
                clip_grad_norm=max_grad_norm,
                measure_noise=measure_noise,
                loss_scale=None if scaler is None or not scaler.is_enabled() else LossScale(scaler),
            ),
        )
        self._runner = StepRunner(
            step=self.train_step,
            micro_batches=_OfRows("power_of_two"),
            make_recovery=lambda split, reliefs: Recovery(
                split.micro_batch, _powers_below(split.micro_batch), grow_back_after
            ),
            watchdog=_Unwatched(),
            step_timeout=0.0,
            events=_Log(self.ranks.is_zero),
            advice=lambda: (
                "Resume from a checkpoint with a smaller size, a larger headroom, or shorter rows."
            ),
            wait_for_memory=wait_for_memory,
        )
        self._size = 0
        self.steps = 0
        """Steps taken."""

    def __call__(
        self, rows: Sequence[Any], collate: Callable[[list[Any]], Any], size: int
    ) -> Outcome:
        """Take a step.

        Args:
            rows: this rank's rows of the step; every rank must have as many.
            collate: makes a micro-batch of some of them.
            size: rows in a micro-batch, as long as memory suffices; the last may have fewer.

        Raises:
            TrainingOutOfMemory: not even one row fits, on every rank; or memory ran out in the optimizer,
                on the rank where it did.
            UsageError: the ranks have different numbers of rows, or ``forward`` returns something else than
                a sum and its weight.
        """
        self._check(rows, size)
        runner = self._runner
        if size != self._size:
            runner.begin(Split(size, -(-len(rows) // size), self.ranks.size, len(rows)))
            self._size = int(size)
        self.steps += 1
        before = runner.retried_steps
        outcome = runner.run(_Rows(rows, collate), self.steps)
        return Outcome(
            loss=outcome.loss,
            weight=outcome.tokens,
            gradient_norm=outcome.gradient_norm,
            micro_batch=max(len(micro_batch.sample_ids) for micro_batch in runner.computed),
            retried=runner.retried_steps - before,
            allocation_retries=outcome.retries,
            overflow=outcome.overflow,
            noise=outcome.noise,
        )

    def _check(self, rows: Sequence[Any], size: int) -> None:
        if size < 1:
            raise UsageError(f"size: {size!r} is not a number of rows, 1 or more.")
        fewest, most = self.ranks.spread(len(rows))
        if fewest != most:
            raise UsageError(
                f"rows: one rank has {fewest} and another {most}. Give every rank as many, as steps_of does."
            )
        if most == 0:
            raise UsageError("rows: a step needs at least one on every rank.")

    def state_dict(self) -> dict[str, Any]:
        """What recovery has learned, for a checkpoint."""
        return {"size": self._size, "steps": self.steps, **self._runner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was called."""
        if size := state["size"]:
            self._runner.begin(Split(size, 1, self.ranks.size))
        self._size, self.steps = size, state["steps"]
        self._runner.load_state_dict(state)


class _Rows:
    """The rows of one step, as often as they are asked for."""

    def __init__(self, rows: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._rows = rows
        self._collate = collate

    def step(self, rows: int, size: int) -> Iterator[MicroBatch]:
        for start in range(0, len(self._rows), size):
            some = self._rows[start : start + size]
            yield MicroBatch(tuple(range(start, start + len(some))), self._collate(list(some)))

    def advance(self, rows: int) -> None: ...


class _OfRows(ByRows):
    """Micro-batches of rows that may be anything."""

    def computed(self, micro_batch: MicroBatch) -> Computed:
        return Computed(micro_batch.sample_ids, len(micro_batch.sample_ids), 0, 0)


class _Unwatched:
    def enter(self, phase: str, patience: float | None) -> None: ...


class _Log:
    """Logs what happens to the micro-batch, on rank 0."""

    def __init__(self, is_rank_zero: bool) -> None:
        self._log = log.warning if is_rank_zero else log.debug

    def changed(self, step: int, reason: str, **what: tuple[int, int]) -> None:
        before, after = what["micro_batch"]
        self._log(f"micro-batch {before} -> {after} ({reason}, step {step})")

    def noticed(self, step: int, what: str) -> None:
        self._log(f"{what} (step {step})")


def _powers_below(size: int) -> list[int]:
    return [1 << exponent for exponent in range(size.bit_length()) if 1 << exponent < size]
