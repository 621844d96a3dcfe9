"""One optimizer step: the same object wherever one is needed, so that what is probed is what is trained.

    for batch in micro_batches:
        step.forward_backward(batch)
    outcome = step.apply()

Running out of memory does not raise while the step can still be discarded. The rank that ran out drops
everything the step made, launches the collectives that the others still expect (see
``ranks.collectives``), and reports the failure in the one all-reduce that a step has. Then ``outcome.lost``
is true on every rank, nothing has changed on any, and the caller decides what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchtune_adaptive.common import TrainingOutOfMemory
from torchtune_adaptive.core.device.memory import DeviceMemory, is_out_of_memory
from torchtune_adaptive.core.private import tree_leaves, tree_map
from torchtune_adaptive.core.ranks import fsdp
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.collectives import AnotherRankFailed, Collectives, NoCollectives
from torchtune_adaptive.core.ranks.ddp import Replicas, wrapped_in
from torchtune_adaptive.core.sizes.noise import NoiseSums
from torchtune_adaptive.core.step import gradients
from torchtune_adaptive.core.step.knobs import Choice
from torchtune_adaptive.core.step.loss_scale import LossScale
from torchtune_adaptive.core.step.objective import Batch, Objective, Summed
from torchtune_adaptive.core.step.switches import Switches
from torchtune_adaptive.core.step.totals import SmallBatches, Total


class StepHalfApplied(Exception):
    """Memory ran out where parameters may have changed already.

    ``phase`` says where, and ``here`` whether it was on this rank.
    """

    def __init__(self, phase: str, here: bool = True) -> None:
        self.phase = phase
        self.here = here
        super().__init__(f"out of memory in the {phase}{'' if here else ' of another rank'}")


@dataclass(frozen=True)
class StepOptions:
    """How a step is taken."""

    survive: bool = True
    """Discard a step in which memory runs out; otherwise the error is raised as it is."""

    activations: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes what forward passes run in, such as activation offloading; a failed step's is replaced."""

    switches: Switches = field(default_factory=Switches)
    """The memory knobs that can be changed between steps."""

    clip_grad_norm: float | None = None
    """The norm above which gradients are scaled down."""

    optimizer_in_backward: bool = False
    """The optimizers step in backward, by hooks that they come with."""

    launched: Callable[[], None] = lambda: None
    """Called after every collective that FSDP launches, if the step is to survive."""

    measure_noise: bool = False
    """Measure gradient noise, with one more norm of each micro-batch's gradient. Not possible where the
    optimizers step in backward: there the step's gradient is never complete."""

    loss_scale: LossScale | None = None
    """Scales losses against underflow in float16. Not possible where the optimizers step in backward."""

    stop_requested: Callable[[], bool] = lambda: False
    """Whether this rank has been asked to stop; all ranks learn of it in the outcome."""


@dataclass(frozen=True)
class StepOutcome:
    """What a step did, equal on every rank."""

    lost: bool
    """A rank ran out of memory, and the step left no trace."""

    failures: tuple[str | None, ...] = ()
    """For a lost step: the phase in which each rank ran out of memory, or None for those that did not."""

    tokens: int = 0
    """The weight of the objective, over all ranks: the tokens that were predicted, or the pairs compared."""

    loss: float = 0.0
    """Mean loss of those, before the step."""

    gradient_norm: float | None = None
    """Where gradients are clipped: their norm before clipping."""

    retries: int = 0
    """How often the allocators of all ranks had to free cached memory to continue."""

    stop: bool = False
    """A rank has been asked to stop."""

    overflow: bool = False
    """With loss scaling: a gradient overflowed, so the optimizer has not stepped."""

    noise: NoiseSums | None = None
    """Where it is measured: what the step says about the noise in its gradient, if anything."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the objective reports besides the loss: means over the same terms."""


class State(Enum):
    """What this rank knows about the step. It only ever moves down this list."""

    RUNNING = auto()
    """No failure that this rank knows of."""

    FAILED_HERE = auto()
    """This rank ran out of memory, and the others have yet to learn it."""

    LOST = auto()
    """A rank ran out of memory, and every rank knows."""


class TrainStep:
    """Forward, backward, and the optimizer step of a model.

    Args:
        model: the model that is trained, sharded by FSDP2 or not.
        objective: what is minimized.
        optimizers: the optimizer, or one for each parameter if they step in backward.
        device: where the model runs.
        memory: that device's memory.
        ranks: the ranks of the run.
        options: how the step is taken.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        objective: Objective,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        memory: DeviceMemory,
        ranks: Ranks,
        options: StepOptions | None = None,
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizers = optimizers
        self.device = device
        self.memory = memory
        self.ranks = ranks
        self.options = options = options or StepOptions()
        self.phase = "forward"
        self._models = (model, *objective.frozen)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._activations = options.activations()
        measures_noise = options.measure_noise and not options.optimizer_in_backward
        self._small = SmallBatches(device) if measures_noise else None
        reducing = self._small.reducing if self._small is not None else None
        self._collectives = (
            Collectives(self._models, ranks, device, options.launched, reducing)
            if options.survive
            else NoCollectives(self._models, reducing)
        )
        wrapped = wrapped_in(model)
        self._replicas = Replicas(wrapped, ranks) if wrapped is not None else None
        # FSDP reduces gradients to their mean over the ranks, we those of replicas to their sum.
        self._averaged_over = ranks.size if self._replicas is None else 1
        slots = len(Total) + len(objective.metrics)
        self._totals = torch.zeros(slots, dtype=torch.float64, device=device)
        for each in self._models:
            memory.adopt([*each.parameters(), *each.buffers()])
        memory.adopt(_optimizer_state(optimizers))
        self._retries_before = memory.retries()
        self._begin()

    def _begin(self) -> None:
        self._state = State.RUNNING
        self._failed_in: str | None = None  # the phase in which this rank ran out of memory
        self._tokens = 0
        self._loss: torch.Tensor | None = None  # summed over tokens, and over micro-batches
        self._metrics: torch.Tensor | None = None  # summed likewise
        self._graph: torch.Tensor | None = None  # between forward and backward
        self._result: StepOutcome | None = None  # where the optimizer steps in backward
        if self._small is not None:
            self._small.begin()
        self._collectives.end_step()

    def switch(self, choice: Choice) -> None:
        """Use these values of the memory knobs from the next step on; on all ranks alike."""
        if self.options.switches.set(choice):
            self._collectives.record_again()
        self._activations = self.options.activations()

    # --- forward and backward -------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> None:
        """Add one micro-batch to the step."""
        if self._collectives.disturbed and self._loss is None:
            # FSDP would take a forward pass that had no backward for a part of this step, and gather more.
            self._reset_models()
        self._collectives.begin_pass()
        self._do("forward", self._forward, batch)
        if self.options.optimizer_in_backward:
            self._exchange_before_backward()
        self._do("backward", self._backward)
        if self._state is State.RUNNING and not self._collectives.end_pass():
            self._state = State.LOST

    def _forward(self, batch: Batch) -> None:
        if self._small is not None and not self._replicas and self._small.only_first_is_left():
            self._small.first = self._squared_gradient_norm()
        tokens, rows = self.objective.weight(batch), self.objective.rows(batch)
        inputs = self._to_device(batch)
        with self._apart():
            loss = self.objective.summed_loss(self._run_model, inputs, tokens)
        if isinstance(loss, Summed):
            if loss.metrics is not None:
                self._add_metrics(loss.metrics)
            if loss.weight is not None:
                tokens = loss.weight
            loss = loss.loss
        self._tokens += tokens
        if self._small is not None:
            self._small.add(tokens, rows)
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        self._graph = loss

    def _to_device(self, batch: Batch) -> Batch:
        def copied(value: Any) -> Any:  # tensors, and the block masks of packed rows
            return value.to(self.device) if hasattr(value, "to") else value

        moved = tree_map(copied, batch)
        self.memory.adopt(leaf for leaf in tree_leaves(moved) if isinstance(leaf, torch.Tensor))
        return moved

    def _add_metrics(self, metrics: Mapping[str, torch.Tensor]) -> None:
        sums = torch.stack([metrics[name].double() for name in self.objective.metrics])
        self._metrics = sums if self._metrics is None else self._metrics + sums

    def _run_model(self, *arguments: Any, **named: Any) -> Any:
        with self._activations:
            return self.model(*arguments, **named)

    def _apart(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._replicas is None else self._replicas.apart()

    def _backward(self) -> None:
        loss, self._graph = self._graph, None
        assert loss is not None
        if self._result is not None:
            loss = loss * gradients.divide(self._averaged_over, self._result.tokens)
        if self.options.loss_scale is not None:
            loss = loss * self.options.loss_scale.factor
        with self._apart():
            loss.backward()

    def _exchange_before_backward(self) -> None:
        """Where backward is the optimizer step, gradients are scaled in it, and there is no way back."""
        if self._state is State.LOST:
            return
        if self._collectives.failed_elsewhere():
            self._state = State.LOST
            return
        outcome = self._exchange()
        self._result = None if outcome.lost else outcome

    def evaluate(self, batch: Batch, counts: bool = True) -> StepOutcome:
        """The loss of one micro-batch in evaluation mode, without gradients; nothing of it stays.

        Only between steps: FSDP is reset, which drops gradients.

        Args:
            batch: on the host; if memory runs out, the outcome is lost on every rank.
            counts: whether its tokens do. A rank that has no row left, where others have, evaluates one for
                nothing, to take part in the collectives.
        """
        self._collectives.begin_pass("evaluation")
        with _evaluating(self.model):
            self._do("evaluation", self._forward_only, batch, counts)
        if self._state is State.RUNNING and not self._collectives.end_pass():
            self._state = State.LOST
        try:
            if self._state is not State.LOST:
                outcome = self._exchange()
            return self._lose() if self._state is State.LOST else outcome
        finally:
            self._begin()

    def _forward_only(self, batch: Batch, counts: bool) -> None:
        self._forward(batch)
        self._graph = None
        if not counts:
            self._tokens, self._metrics = 0, None
            self._loss = torch.zeros_like(self._sum_of_losses())
        # FSDP remembers a forward pass until its backward: without this, the next step would gather a layer
        # once more than before. And parameters would stay gathered where they do between the two.
        for model in self._models:
            fsdp.reset(model)

    # --- what follows all micro-batches -----------------------------------------------------------

    def apply(self, even_if_overflow: bool = False) -> StepOutcome:
        """End the step: apply it, or, if memory ran out on any rank, leave no trace of it.

        Args:
            even_if_overflow: with loss scaling: step the optimizer whatever its gradients are, and keep the
                scale, as a trial does.

        Raises:
            StepHalfApplied: memory ran out after parameters may have changed on some rank.
        """
        try:
            if self.options.optimizer_in_backward:
                return self._applied_in_backward()
            return self._apply(even_if_overflow)
        finally:
            self._begin()

    def _apply(self, even_if_overflow: bool) -> StepOutcome:
        squared_norm = None
        if self._replicas is not None:
            self._reduce_replicas(self._replicas)
        scale = self.options.loss_scale
        wanted = (
            self.options.clip_grad_norm is not None
            or scale is not None
            or (self._small is not None and self._small.measured)
        )
        if wanted and self._state is State.RUNNING:
            squared_norm = self._attempt("gradient norm", self._squared_gradient_norm)
        if self._state is not State.LOST:
            outcome = self._exchange(squared_norm)
        if self._state is State.LOST:
            return self._lose()
        factor = self._scale(outcome)  # by the scale that the losses had
        if scale is not None and not even_if_overflow:
            scale.update(outcome.overflow)
            if outcome.overflow:
                self._drop_gradients()
                return outcome
        try:
            with self.memory.running():
                self._scale_gradients(factor)
                self.phase = "optimizer step"
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
        except Exception as error:
            if not self._survives(error):
                raise
            raise StepHalfApplied(self.phase) from None
        return outcome

    def _reduce_replicas(self, replicas: Replicas) -> None:
        """Sum up the gradients of all ranks, if no rank has failed; see ``ranks.ddp``."""
        found = self._gradients()
        if self._state is State.RUNNING and self._small is not None:
            self._attempt("gradient noise", self._small.reducing_all, found)
        has_gradient = (parameter.grad is not None for parameter in self._parameters)
        if not replicas.all_are_ready(self._state is not State.RUNNING, has_gradient):
            self._state = State.LOST
            return
        replicas.reduce(found)

    def _applied_in_backward(self) -> StepOutcome:
        if self._state is State.LOST and self._result is None:
            return self._lose()
        if self._state is not State.RUNNING:
            raise StepHalfApplied("backward", here=self._failed_in is not None)
        assert self._result is not None
        return self._result

    def _exchange(self, squared_norm: torch.Tensor | None = None) -> StepOutcome:
        """The step's one all-reduce, and the one time that the host waits for the device."""
        totals = self._totals.zero_()
        if self._state is State.FAILED_HERE:
            totals[Total.FAILED].fill_(1.0)
        else:
            totals[Total.TOKENS].fill_(float(self._tokens))
            totals[Total.LOSS].copy_(self._sum_of_losses())
            if self._metrics is not None:
                totals[len(Total) :].copy_(self._metrics)
            if squared_norm is not None:
                totals[Total.SQUARED_GRADIENT_NORM].copy_(squared_norm)
            if self._small is not None:
                self._small.fill(totals)
        totals[Total.RETRIES].fill_(float(self._new_retries()))
        if self.options.stop_requested():
            totals[Total.STOP].fill_(1.0)
        if self.ranks.size > 1:
            dist.all_reduce(totals)
        summed = totals.tolist()
        tokens, loss, squared, failed, retries = summed[: Total.SMALL]
        if failed > 0:
            self._state = State.LOST
            return StepOutcome(lost=True)
        scale = self.options.loss_scale
        norm = None
        if self.options.clip_grad_norm is not None:
            norm = squared**0.5 * self._divided_by(tokens)
        return StepOutcome(
            lost=False,
            tokens=int(tokens),
            loss=gradients.divide(loss, tokens),
            gradient_norm=norm,
            retries=int(retries),
            stop=summed[Total.STOP] > 0,
            noise=self._small.sums(summed, self._averaged_over)
            if self._small is not None
            else None,
            overflow=scale is not None and not math.isfinite(squared),
            metrics={
                name: gradients.divide(value, tokens)
                for name, value in zip(self.objective.metrics, summed[len(Total) :], strict=True)
            },
        )

    def _new_retries(self) -> int:
        """Since the last step, whether that was lost or not."""
        before, self._retries_before = self._retries_before, self.memory.retries()
        return self._retries_before - before

    def _sum_of_losses(self) -> torch.Tensor:
        if self._loss is None:
            raise RuntimeError("a step needs at least one micro-batch before it can be applied")
        return self._loss

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _squared_gradient_norm(self) -> torch.Tensor:
        """This rank's part, before gradients are scaled."""
        return gradients.squared_norm(self._gradients(), self.ranks.size, self.device)

    def _divided_by(self, tokens: float) -> float:
        """What turns gradients as FSDP, or we, have reduced them into those of the mean loss."""
        factor = gradients.divide(self._averaged_over, tokens)
        scale = self.options.loss_scale
        return factor if scale is None else factor / scale.factor

    def _scale(self, outcome: StepOutcome) -> float:
        """What turns the sum over tokens (averaged over ranks, by FSDP) into their mean, clipped."""
        factor = self._divided_by(outcome.tokens)
        clip = self.options.clip_grad_norm
        if outcome.gradient_norm is not None and clip is not None:
            factor *= min(1.0, clip / (outcome.gradient_norm + 1e-6))
        return factor

    def _scale_gradients(self, factor: float) -> None:
        self.phase = "gradient scaling"
        gradients.scale(self._gradients(), factor, self.device, self._insist)

    def _insist(self, multiply: Callable[..., Any], *arguments: Any) -> None:
        """Try again if memory runs out: from here on, the other ranks rely on this one's step.

        A product in place needs no memory. What may fail for want of it is loading its kernel, before
        anything is multiplied.
        """
        try:
            multiply(*arguments)
        except Exception as error:
            if not self._survives(error):
                raise
            self.memory.release()
            multiply(*arguments)

    # --- out of memory ------------------------------------------------------------------------------

    def _do(self, phase: str, work: Callable[..., None], *arguments: Any) -> None:
        """One phase of a pass: do it or, on a rank that ran out of memory, launch its collectives only."""
        if self._state is State.LOST:
            return
        if self._state is State.RUNNING:
            self._collectives.begin_phase(phase)
            self._attempt(phase, work, *arguments)
        if self._state is State.FAILED_HERE and self._finish(phase):
            self._state = State.LOST

    def _finish(self, phase: str) -> bool:
        """Launch what the other ranks wait for; whether they know of the failure then."""
        try:
            return self._collectives.finish(phase)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingOutOfMemory(
                f"Out of memory in {self._failed_in}, and again in the buffers of the collectives that the "
                "other ranks wait for: the step cannot be retried. Keep the device for this process, or use "
                f"a smaller batch_size. ({error})"
            ) from error

    def _attempt(self, phase: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do something that can still be discarded."""
        self.phase = phase
        try:
            with self.memory.running():
                return work(*arguments)
        except AnotherRankFailed:
            self._state = State.LOST
        except Exception as error:
            if not self._survives(error):
                raise
            self._state, self._failed_in = State.FAILED_HERE, phase
        # Only now is the exception gone, and with it the frames that held the step's tensors.
        self.forget()
        return None

    def _survives(self, error: Exception) -> bool:
        return self.options.survive and is_out_of_memory(error)

    def forget(self) -> None:
        """Drop everything that the step has made on this rank."""
        self._loss = self._metrics = self._graph = None
        self._activations = self.options.activations()
        gradients.drop_unfinished(self.device)
        self._reset_models()
        self.memory.release()

    def _reset_models(self) -> None:
        self._collectives.disturbed = False
        with self.memory.running():
            for model in self._models:
                fsdp.reset(model)

    def _lose(self) -> StepOutcome:
        failures = self.ranks.gather(self._failed_in)
        self.forget()
        self._new_retries()  # those of a lost step say nothing about the size that follows
        return StepOutcome(lost=True, failures=tuple(failures))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; afterwards each module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _optimizer_state(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [
        value for state in states for value in state.values() if isinstance(value, torch.Tensor)
    ]
