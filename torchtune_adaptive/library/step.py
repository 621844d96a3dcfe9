"""A training step that survives running out of memory, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from torchtune_adaptive.common import UsageError, announce, arguments
from torchtune_adaptive.core import (
    Adjustment,
    NoiseSums,
    Ranks,
    Recovery,
    StepOptions,
    StepRunner,
    TrainStep,
    Weightless,
    candidates,
    device_memory,
    knobs,
    sample_dropout,
)
from torchtune_adaptive.library import checks
from torchtune_adaptive.library.forward_only import ForwardOnly
from torchtune_adaptive.library.layers import LayerCheckpointing, switches_of
from torchtune_adaptive.library.private import is_compiled, scaler_of
from torchtune_adaptive.library.requests import shared_rows
from torchtune_adaptive.library.summed_loss import SummedLoss

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step; the same on every rank."""

    loss: float
    """The mean loss of the step over all ranks, before the optimizer changed the weights."""
    weight: int
    """The number of terms in the loss, over all ranks; with ``shares``, that of ranks."""
    gradient_norm: float | None
    """The norm of the whole gradient before clipping, with ``max_grad_norm``."""
    micro_batch: int
    """The size of a micro-batch, as the step went through: rows or, with ``lengths``, tokens."""
    retried: int
    """The number of times that the step was done again because memory ran out on some rank."""
    allocation_retries: int
    """The number of times that the allocators of all ranks freed cached memory to go on."""
    overflow: bool
    """Whether, with a ``scaler``, the gradient overflowed, so that the optimizer did not step."""
    noise: NoiseSums | None
    """The sums that the step adds to a ``NoiseScale``, with ``measure_noise``."""


class AdaptiveStep:
    """One optimizer step over any number of micro-batches; retried in smaller ones when memory runs out.

    The model may be on a single device, sharded by ``fully_shard`` (on a mesh of one dimension, or HSDP on
    one of two), split by tensor parallelism, with ``fully_shard`` or without, or wrapped in
    ``DistributedDataParallel``. Ranks that split a layer get the same rows. When memory runs out on one rank,
    all ranks discard the step and do it again, with the same rows in smaller micro-batches; no rank is left
    waiting. Gradients are summed over micro-batches and ranks and divided once, by the weight of all, so the
    split never changes the math.

        step = AdaptiveStep(model, optimizer, forward=summed_loss)
        size = find_batch_size(step, worst_case)
        for rows in steps_of(data, size):
            outcome = step(rows, collate_fn, size)

    Args:
        model: the model that is trained.
        optimizer: the optimizer of the model's parameters, created after ``fully_shard``.
        forward: function called with a micro-batch on the device. Returns the loss, summed over its terms
            (tokens, rows, ...), and their number; if that is a tensor on the device, the host waits for it.
            With ``shares``, one tensor: its share of the loss.
        shares: whether ``forward`` returns shares of the loss. They are added up over micro-batches and
            averaged over ranks.
        optimizer_steps: whether a step ends with that of the optimizer. If not, it ends with the gradient of
            the step in ``.grad``, on all ranks or on none, and the caller clips it and steps the optimizer.
        max_grad_norm: the norm above which gradients are scaled down.
        scaler: the scaler of losses against underflow in float16; it is kept up to date. By default, that of
            an optimizer that accelerate or Lightning Fabric has prepared.
        memory_limit: the most capacity that this process may have, such as ``"24GiB"``. On a CPU, the tensors
            of a step are counted against it.
        grow_back_after: steps without trouble after which a size that failed is tried again, or ``"never"``.
        sync_each_batch: whether FSDP reduces the gradients of each micro-batch. With False, each rank adds
            them up whole and reduces them with the last one: fewer collectives, for the memory of unsharded
            gradients. ``DistributedDataParallel`` always reduces with the last.
        measure_noise: whether to measure gradient noise, by one more norm of each micro-batch's gradient.
        activation_checkpointing: two functions that turn it on and off, or a ``LayerCheckpointing``. When
            memory runs out, a step is done again with it, in all layers, which changes no bit, before
            micro-batches get smaller.
        restore: function called before a step is done again and after a search: it sets back what ``forward``
            has changed on the host, such as sums of metrics.
        frozen: sharded models that ``forward`` runs besides, such as a teacher.
        compiled: whether ``forward`` runs compiled code; by default, whether the model is compiled.
        dropout: ``torch``, or ``sample``: the mask of a row in an ``nn.Dropout`` of the model is a function
            of the seed, the layer's name, the steps taken before, and the row's number in its step; the same
            on any number of ranks and in any micro-batch. Other ways to drop are refused.
        seed: the seed of dropout by sample.
        sequences: the sequences that ``forward`` gives the model for each row, such as 2 for pairs: the first
            ones of all rows, and then the second ones. For dropout by sample.
        context_mesh: the ranks over which rows are split along their sequence, as by context parallelism; a
            mesh of one dimension. Their micro-batches must always have one shape.
        wait_for_memory: seconds to wait, in all, where not even one row fits: another process may be the
            cause.
        timeout: seconds that a rank may take to answer the others; by default, the timeout of the process
            group or, where ``forward`` is compiled, an hour if that is longer.

    Raises:
        UsageError: these do not work together; nothing has run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        forward: Callable[[Any], tuple[torch.Tensor, int] | torch.Tensor],
        *,
        shares: bool = False,
        optimizer_steps: bool = True,
        max_grad_norm: float | None = None,
        scaler: GradScaler | None = None,
        memory_limit: int | str | None = None,
        grow_back_after: int | Literal["never"] = 100,
        sync_each_batch: bool = True,
        measure_noise: bool = False,
        activation_checkpointing: (
            tuple[Callable[[], Any], Callable[[], Any]] | LayerCheckpointing | None
        ) = None,
        restore: Callable[[], Any] | None = None,
        frozen: Sequence[nn.Module] = (),
        compiled: bool | None = None,
        dropout: Literal["torch", "sample"] = "torch",
        seed: int = 0,
        sequences: int = 1,
        context_mesh: DeviceMesh | None = None,
        wait_for_memory: float = 0.0,
        timeout: float | None = None,
    ) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after evaluation, the parameters of the root are whole, and others
        if scaler is None and optimizer_steps:
            scaler = scaler_of(optimizer)
        optimizer = checks.plain_optimizer(optimizer)
        checks.require_trainable(model, optimizer)
        arguments.function("forward", forward)
        arguments.one_of("shares", shares, (True, False))
        TrainStep.require_no_graphs("forward", forward)
        arguments.norm("max_grad_norm", max_grad_norm)
        arguments.seconds("wait_for_memory", wait_for_memory)
        calm_steps = arguments.whole_or_never("grow_back_after", grow_back_after)
        if not isinstance(scaler, GradScaler | None):
            raise UsageError(f"scaler: {scaler!r} is not a torch.amp.GradScaler.")
        if timeout is not None and arguments.seconds("timeout", timeout) == 0:
            raise UsageError("timeout: no rank can answer in 0 seconds.")
        limit = arguments.memory("memory_limit", memory_limit)
        arguments.one_of("dropout", dropout, ("torch", "sample"))
        arguments.whole("seed", seed, at_least=0)
        arguments.whole("sequences", sequences)
        if scaler is not None and measure_noise:
            raise UsageError(
                "measure_noise: not with a scaler, whose scale changes from step to step."
            )
        if shares and measure_noise:
            raise UsageError(
                "measure_noise: not with shares of the loss, whose number of terms is not known. Return the "
                "sum over all terms, and their number."
            )
        if not optimizer_steps and (max_grad_norm is not None or scaler is not None):
            raise UsageError(
                "optimizer_steps: False leaves clipping and scaling to the caller. Do not pass "
                "max_grad_norm or scaler."
            )
        self.restore = (lambda: None) if restore is None else arguments.function("restore", restore)
        self.compiled = is_compiled(model) if compiled is None else compiled
        self.ranks = Ranks(timeout, self.compiled)
        device = checks.device_of(model)
        frozen = checks.modules("frozen", frozen)
        self.objective = SummedLoss(forward, frozen, shares)
        layers = activation_checkpointing
        self.layers = layers if isinstance(layers, LayerCheckpointing) else None
        """What checkpoints layers one by one, if it was given."""
        self.train_step = TrainStep(
            model=model,
            objective=self.objective,
            optimizers=[optimizer],
            device=device,
            memory=device_memory(device, limit),
            ranks=self.ranks,
            options=StepOptions(
                compiled=self.compiled,
                optimizer_steps=optimizer_steps,
                switches=switches_of(activation_checkpointing),
                clip_grad_norm=max_grad_norm,
                sync_each_batch=sync_each_batch,
                measure_noise=measure_noise,
                scaler=scaler,
                context_group=checks.one_dimension("context_mesh", context_mesh),
            ),
        )
        self._keys: sample_dropout.DropoutKeys | None = None
        if dropout == "sample":
            if self.train_step.splits_rows:
                raise UsageError(
                    "dropout: by sample, each rank must have rows of its own, but layers or rows are split "
                    "over ranks. Use torch's dropout instead."
                )
            sample_dropout.drop_by_sample(model, compiled=device.type != "cpu")
            self._keys = sample_dropout.DropoutKeys(model, seed, sequences, device)
        else:
            sample_dropout.drop_by_torch(model)
        self._runner = StepRunner(
            self.train_step,
            advice=lambda: self.advice(),
            wait_for_memory=wait_for_memory,
        )
        self._grow_back_after = calm_steps
        self.divides = True
        """Whether micro-batches get smaller when memory runs out; if not, only more is computed again."""
        self.advice: Callable[[], str] = self._advice
        """Function that says how to go on where a step cannot be taken."""
        self._size = 0
        self._spare: list[Any] = []  # a row of this rank's last step that had any
        self.steps = 0
        """Steps taken."""

    def __call__(
        self,
        rows: Sequence[Any],
        collate_fn: Callable[[list[Any]], Any],
        size: int,
        lengths: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Outcome:
        """Take a step.

        Args:
            rows: this rank's rows of the step. Those of a ``DataLoader`` with ``collate_fn=list`` are a list
                of rows; a batch that has been collated is none. Ranks may have different numbers of them: one
                whose rows are used up runs one of them again beside the others, without weight. A rank that
                has none runs one of its last step.
            collate_fn: function that makes a micro-batch of some of them.
            size: rows in a micro-batch, the same on every rank, as long as memory suffices; the last may have
                fewer. With ``lengths``: tokens in a micro-batch, padding included.
            lengths: the tokens in each of the rows. A micro-batch then has as many rows of similar length as
                ``size`` allows at the longest of them.
            groups: the numbers of rows that may share a micro-batch, in their order and the same on every
                rank; by default, all may.
            numbers: the number of each row among those of the step on all ranks, which its dropout by sample
                follows. By default, those of ``steps_of``; other rows are taken to be dealt out one by one,
                as ``DistributedSampler`` does it: row i of rank r of n has the number i x n + r.

        Raises:
            TrainingOutOfMemory: not even one row fits, on every rank; or memory ran out in the optimizer,
                on the rank where it did.
            UsageError: the ranks have different sizes, a row is longer than ``size`` allows, a rank has no
                rows and had none before, or ``forward`` returns neither a sum and its weight nor, with
                ``shares``, one tensor; or, with ``shares``, ranks have different numbers of rows.
            RankLost: another rank has not answered in time, or has ended; the ranks cannot go on.

        After any other exception nothing is left of the step, so another can be taken, on all ranks.
        """
        shared = shared_rows(
            self.train_step,
            rows,
            collate_fn,
            size,
            lengths,
            groups,
            numbers,
            may_be_none=bool(self._spare),
        )
        size, unit = shared.size, "row" if lengths is None else "token"
        if (size, unit) != (self._size, self._runner.unit):
            self.train_step.collectives.wait_for_pending()  # a size that is refused leaves recovery as it is
            self._begin(size, unit)
        sizes: list[int] = []  # one for each attempt
        if not self.train_step.options.optimizer_steps:
            self.train_step.drop_gradients()  # of the step before, which were the caller's

        def collated(number: int, part: Sequence[int]) -> Any:
            self.objective.begins = number == 0
            if not part:  # others have more rows
                return Weightless(collate_fn([*self._spare]))
            some = [rows[position] for position in part]
            if number == 0:
                self._spare = some[:1]
            return collate_fn(some)

        def keyed(part: Sequence[int]) -> AbstractContextManager[Any]:
            assert self._keys is not None
            return self._keys.running(0, self.steps, [shared.numbers[place] for place in part])

        def micro_batches(size: int) -> _MicroBatches:
            if sizes:
                self.restore()
            sizes.append(size)
            first = collated(0, shared.first(size))  # while the ranks hear of each other
            parts = shared.parts(size)
            self.objective.equal_rows = shared.least == shared.most
            return _MicroBatches([first], parts, collated, keyed if self._keys else None)

        outcome = self._runner.run(micro_batches, self.steps + 1, self._adjusted)
        self.steps += 1
        return Outcome(
            loss=outcome.loss,
            weight=outcome.weight,
            gradient_norm=outcome.gradient_norm,
            micro_batch=min(sizes[-1], shared.most) if lengths is None else sizes[-1],
            retried=len(sizes) - 1,
            allocation_retries=outcome.retries,
            overflow=outcome.overflow,
            noise=outcome.noise,
        )

    @property
    def normalizing_layer(self) -> str:
        """The name of a layer in training mode that normalizes over the rows of a micro-batch, or nothing."""
        return checks.normalizes_over_rows(self.train_step.model)

    def keep_whole(self) -> None:
        """Have micro-batches keep their size where memory runs out, from the next step on."""
        self.divides = False
        if self._size:
            self._begin(self._size, self._runner.unit)

    @property
    def micro_batch(self) -> int:
        """The size that micro-batches have now."""
        return self._runner.size

    @property
    def retried_steps(self) -> int:
        """How often a step was done again because memory ran out."""
        return self._runner.retried_steps

    def checkpoint_layers(self, checkpointed: int | str) -> None:
        """Checkpoint so many layers, or those of a name, from the next step on; on all ranks alike."""
        if self.layers is None:
            raise UsageError(
                "checkpoint_layers: the step has no layers. Pass activation_checkpointing=LayerCheckpointing("
                "...)."
            )
        if isinstance(checkpointed, int):
            checkpointed = self.layers.name(checkpointed)
        self._switch(knobs.Choice({knobs.CHECKPOINT: checkpointed}))

    def _switch(self, choice: knobs.Choice) -> None:
        self.train_step.switch(choice)
        self._runner.follow_switches()
        if self._size:  # recovery begins anew: what it has given up was given up with other layers
            self._begin(self._size, self._runner.unit)

    def collective(self, launch: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call a function that launches collectives of one's own, in ``forward`` or anywhere else.

        In a step the ranks agree before each of them that none has failed, so that no rank waits in it for
        another. All ranks call the same for every micro-batch, and it launches as many each time.
        """
        return self.train_step.collectives.together(lambda: launch(*arguments, **named))

    def forward_only(
        self,
        work: Callable[[Any], Any],
        *,
        name: str | None = None,
        worst_case: Callable[[int], Any] | None = None,
        gathers: bool = False,
    ) -> ForwardOnly:
        """Make a phase of its own of what runs without gradients between steps: scoring, generating, ...

            score = step.forward_only(log_probs)
            scoring_size = find_batch_size(step, worst_case, phase=score)
            old = score(rows, collate_fn, scoring_size)

        Args:
            work: function of a micro-batch on the device. Returns a tensor or a list with one result for each
                row; the model is in evaluation mode, and no gradients are computed.
            name: the name in messages; by default, that of the function.
            worst_case: function that makes its largest micro-batch of so many rows, on the host; by default,
                the one that ``find_batch_size`` is given.
            gathers: whether each rank gets all parameters of a sharded model first. Then ``work`` may do
                something else on each rank, such as generating until its rows have stopped.
        """
        arguments.function("work", work)
        if worst_case is not None:
            arguments.function("worst_case", worst_case)
        name = name or getattr(work, "__name__", "forward_only").strip("<>_")
        step, grow_back_after = self.train_step, self._grow_back_after
        return ForwardOnly(step, work, name, worst_case, gathers, grow_back_after)

    def _begin(self, size: int, unit: str = "row") -> None:
        """Use micro-batches of this size from the next step on."""
        self._size, self._runner.unit = size, unit
        if self.divides and (name := self.normalizing_layer):
            self.divides = False
            line = (
                f"{name} normalizes over a micro-batch, which keeps its rows when memory runs out"
            )
            announce(log, line, rank_zero=self.ranks.is_zero)
        smaller: Sequence[int] = candidates("power_of_two", size, size) if self.divides else ()
        if unit == "token":
            smaller = [size >> halvings for halvings in range(size.bit_length())]
        reliefs = len(self._runner.reliefs) - 1
        self._runner.begin(size, Recovery(size, smaller, self._grow_back_after, reliefs))

    def _advice(self) -> str:
        if self._runner.size == 1:
            return "There is no smaller size. Resume from a checkpoint with shorter rows or more ranks."
        return "Resume from a checkpoint with a smaller size, a larger headroom, or shorter rows."

    def _adjusted(self, adjustment: Adjustment) -> None:
        """Log what is done about memory, on rank 0."""
        reason, (before, after) = adjustment.reason, adjustment.size
        what = f"{reason} (step {adjustment.step})"
        name = "micro-batch" if self._runner.unit == "row" else "token budget"
        changes = [f"{name} {before} -> {after}"] if before != after else []
        for knob, (old, new) in adjustment.knobs.items():
            changes.append(f"{knob.replace('_', ' ')} {old} -> {new}")
        if changes:
            what = f"{', '.join(changes)} ({reason}, step {adjustment.step})"
        announce(log, what, logging.WARNING, rank_zero=self.ranks.is_zero)

    def state_dict(self) -> dict[str, Any]:
        """The state of recovery, for a checkpoint."""
        return {
            "size": self._size,
            "unit": self._runner.unit,
            "steps": self.steps,
            **self._runner.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was called."""
        missing = {"size", "steps", *self._runner.state_dict()} - {*state}
        if missing:
            raise UsageError(
                f"load_state_dict: {', '.join(sorted(missing))} is missing. Pass what state_dict returned."
            )
        self._size, self.steps = state["size"], state["steps"]
        if self.layers is not None:
            self._switch(knobs.Choice(state["knobs"]))
        if self._size:
            self._begin(self._size, state.get("unit", "row"))
        self._runner.load_state_dict(state)


@dataclass(frozen=True)
class _MicroBatches:
    """The micro-batches of a step, each collated when its turn comes; so it is known which is the last."""

    first: list[Any]
    """The first one, until it is taken."""
    parts: Sequence[Sequence[int]]
    """The positions of the rows in each."""
    collated: Callable[[int, Sequence[int]], Any]
    keyed: Callable[[Sequence[int]], AbstractContextManager[Any]] | None
    """With dropout by sample, the context in which a micro-batch of these rows goes forward and backward."""

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        for number, part in enumerate(self.parts):
            batch = self.collated(number, part) if number else self.first.pop()
            if self.keyed is None:
                yield batch
                continue
            with self.keyed(part):
                yield batch
