"""One optimizer step: the same object wherever one is needed, so that what is probed is what is trained.

    for batch in micro_batches:
        step.forward_backward(batch)
    outcome = step.apply()

Running out of memory does not raise while the step can still be thrown away. The rank that ran out drops
everything the step made, stands in for itself in the collectives that are left (see ``ranks.collectives``),
and says so in the one all-reduce that a step has. Then ``outcome.lost`` is true on every rank, nothing has
changed on any, and the caller decides what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torchtune import utils
from torchtune.training import OffloadActivations

from torchtune_adaptive.batching.noise import NoiseSums
from torchtune_adaptive.device.memory import DeviceMemory, is_out_of_memory
from torchtune_adaptive.ranks import fsdp
from torchtune_adaptive.ranks.agreement import Ranks
from torchtune_adaptive.ranks.collectives import AnotherRankFailed, Collectives
from torchtune_adaptive.step.totals import SmallBatches, Total

Batch = dict[str, Any]


class StepHalfApplied(Exception):
    """Memory ran out where parameters may have changed already.

    ``phase`` says where, and ``here`` whether it was on this rank.
    """

    def __init__(self, phase: str, here: bool = True) -> None:
        self.phase = phase
        self.here = here
        super().__init__(f"out of memory in the {phase}{'' if here else ' of another rank'}")


@dataclass(frozen=True)
class StepOutcome:
    """What a step did, equal on every rank."""

    lost: bool
    """A rank ran out of memory, and the step left no trace."""

    failures: tuple[str | None, ...] = ()
    """Of a lost step: the phase in which each rank ran out of memory, or None for those that did not."""

    tokens: int = 0
    """Tokens that were trained on, over all ranks."""

    loss: float = 0.0
    """Mean loss of those tokens, before the step."""

    gradient_norm: float | None = None
    """Where gradients are clipped: their norm before clipping."""

    retries: int = 0
    """How often the allocators of all ranks had to give memory back to go on."""

    stop: bool = False
    """A rank has been asked to stop."""

    noise: NoiseSums | None = None
    """Where it is measured: what the step says about the noise in its gradient, if anything."""


class TrainStep:
    """Forward, backward, and the optimizer step of a model.

    Args:
        model: the model, sharded by FSDP2 or not.
        optimizers: the optimizer, or one for each parameter if they step in backward.
        loss_fn: gives the mean loss of the tokens that count.
        device: where the model runs.
        memory: that device's memory.
        ranks: the ranks of the run.
        survive: throw a step away when memory runs out in it; otherwise the error is raised as it is.
        activations: what the forward pass runs in (torchtune's activation offloading, or nothing).
        clip_grad_norm: the norm above which gradients are scaled down.
        optimizer_in_backward: whether the optimizers step in backward, by hooks that they come with.
        launched: called after every collective that FSDP launches.
        measure_noise: measure gradient noise, with one more norm of each micro-batch's gradient. Not where
            the optimizers step in backward: there the step's gradient is never all there.
        stop_requested: whether this rank has been asked to stop; all ranks learn of it in the outcome.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        loss_fn: nn.Module,
        device: torch.device,
        memory: DeviceMemory,
        ranks: Ranks,
        survive: bool,
        activations: AbstractContextManager[Any] | None = None,
        clip_grad_norm: float | None = None,
        optimizer_in_backward: bool = False,
        launched: Callable[[], None] = lambda: None,
        measure_noise: bool = False,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.loss_fn = loss_fn
        self.device = device
        self.memory = memory
        self.ranks = ranks
        self.optimizer_in_backward = optimizer_in_backward
        self._stop_requested = stop_requested
        self.phase = "forward"
        self._activations = activations or nullcontext()
        self._clip_grad_norm = clip_grad_norm
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._small = SmallBatches(device) if measure_noise and not optimizer_in_backward else None
        reducing = self._small.reducing if self._small is not None else None
        self._collectives: Collectives | None = None
        if survive:
            self._collectives = Collectives(model, ranks, device, launched, reducing)
        elif reducing is not None:
            fsdp.watch_collectives(model, fsdp.launch_only, reducing)
        self._totals = torch.zeros(len(Total), dtype=torch.float64, device=device)
        memory.adopt([*model.parameters(), *model.buffers(), *_optimizer_state(optimizers)])
        self._retries_before = memory.retries()
        self._begin()

    def _begin(self) -> None:
        self._tokens = 0
        self._loss: torch.Tensor | None = None  # summed over tokens, and over micro-batches
        self._graph: torch.Tensor | None = None  # between forward and backward
        self._failed_in: str | None = None  # what this rank knows of itself
        self._lost = False  # what all ranks know
        self._result: StepOutcome | None = None  # where the optimizer steps in backward
        if self._small is not None:
            self._small.begin()

    # --- forward and backward -------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> None:
        """Add one micro-batch to the step."""
        if self._collectives is not None:
            self._collectives.begin_pass()
        self._do("forward", self._forward, batch)
        if self.optimizer_in_backward:
            self._exchange_before_backward()
        self._do("backward", self._backward)
        if self._collectives is not None and not self._lost and self._failed_in is None:
            self._lost = not self._collectives.end_pass()

    def _forward(self, batch: Batch) -> None:
        if self._small is not None and self._small.only_first_is_left():
            self._small.first = self._squared_gradient_norm()
        inputs = dict(batch)
        labels = inputs["labels"]
        ignored: int = self.loss_fn.ignore_index  # type: ignore[assignment]
        tokens = int((labels != ignored).sum())
        nothing_to_learn = not bool((labels[..., 1:] != ignored).any())
        utils.batch_to_device(inputs, self.device)
        self.memory.adopt(tree_leaves(inputs))
        labels = inputs.pop("labels")
        with self._activations:
            logits = self.model(**inputs)

        # Predict each next token; the last position has none.
        labels = F.pad(labels[..., 1:], (0, 1), value=ignored)
        if nothing_to_learn:  # the mean over no tokens would be NaN, and spoil the whole step
            loss = torch.stack([chunk.sum() for chunk in _as_list(logits)]).sum() * 0.0
        elif isinstance(logits, list):
            loss = self.loss_fn(logits, labels) * tokens
        else:
            loss = self.loss_fn(logits.reshape(-1, logits.size(-1)), labels.reshape(-1)) * tokens
        self._tokens += tokens
        if self._small is not None:
            self._small.add(tokens, rows=inputs["tokens"].shape[0])
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        self._graph = loss

    def _backward(self) -> None:
        loss, self._graph = self._graph, None
        assert loss is not None
        if self._result is not None:
            loss = loss * _over(self.ranks.size, self._result.tokens)
        loss.backward()

    def _exchange_before_backward(self) -> None:
        """Where backward is the optimizer step, gradients are scaled in it, and there is no way back."""
        if self._lost:
            return
        if self._collectives is not None and self._collectives.has_failed_elsewhere():
            self._lost = True
            return
        result = self._exchange()
        self._result = None if self._lost else result

    # --- what follows all micro-batches -----------------------------------------------------------

    def apply(self) -> StepOutcome:
        """End the step: take it, or, if memory ran out on any rank, leave no trace of it.

        Raises:
            StepHalfApplied: memory ran out after parameters may have changed on some rank.
        """
        try:
            if self.optimizer_in_backward:
                return self._applied_in_backward()
            return self._apply()
        finally:
            self._begin()

    def _apply(self) -> StepOutcome:
        squared_norm = None
        wanted = self._clip_grad_norm is not None or (
            self._small is not None and self._small.measured
        )
        if wanted and not self._lost and self._failed_in is None:
            squared_norm = self._attempt("gradient norm", self._squared_gradient_norm)
        if not self._lost:
            outcome = self._exchange(squared_norm)
        if self._lost:
            return self._lose()
        scale = self._scale(outcome)
        try:
            with self.memory.running():
                self._scale_gradients(scale)
                self.phase = "optimizer step"
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
        except Exception as error:
            if self._collectives is None or not is_out_of_memory(error):
                raise
            raise StepHalfApplied(self.phase) from None
        return outcome

    def _applied_in_backward(self) -> StepOutcome:
        if self._lost and self._result is None:
            return self._lose()
        if self._lost or self._failed_in is not None:
            raise StepHalfApplied("backward", here=self._failed_in is not None)
        assert self._result is not None
        return self._result

    def _exchange(self, squared_norm: torch.Tensor | None = None) -> StepOutcome:
        """The step's one all-reduce, and the one time that the host waits for the device."""
        totals = self._totals.zero_()
        if self._failed_in is not None:
            totals[Total.FAILED].fill_(1.0)
        else:
            totals[Total.TOKENS].fill_(float(self._tokens))
            totals[Total.LOSS].copy_(self._sum_of_losses())
            if squared_norm is not None:
                totals[Total.SQUARED_GRADIENT_NORM].copy_(squared_norm)
            if self._small is not None:
                self._small.fill(totals)
        if self._collectives is not None:
            totals[Total.RETRIES].fill_(float(self._new_retries()))
        if self._stop_requested():
            totals[Total.STOP].fill_(1.0)
        if self.ranks.size > 1:
            dist.all_reduce(totals)
        summed = totals.tolist()
        tokens, loss, squared, failed, retries = summed[: Total.SMALL]
        self._lost = failed > 0
        if self._lost:
            return StepOutcome(lost=True)
        norm = None
        if self._clip_grad_norm is not None:
            norm = squared**0.5 * _over(self.ranks.size, tokens)
        return StepOutcome(
            lost=False,
            tokens=int(tokens),
            loss=_over(loss, tokens),
            gradient_norm=norm,
            retries=int(retries),
            stop=summed[Total.STOP] > 0,
            noise=self._small.sums(summed, self.ranks.size) if self._small is not None else None,
        )

    def _new_retries(self) -> int:
        """Since the last step, whether that was lost or not."""
        before, self._retries_before = self._retries_before, self.memory.retries()
        return self._retries_before - before

    def _sum_of_losses(self) -> torch.Tensor:
        if self._loss is None:
            raise RuntimeError("a step needs at least one micro-batch before it can be applied")
        return self._loss

    @torch.no_grad()
    def _squared_gradient_norm(self) -> torch.Tensor:
        """This rank's part of the squared norm of all gradients, before they are scaled.

        The parts of all ranks are summed, so a gradient of which several ranks hold the same piece
        counts by its share.
        """
        by_share: dict[float, list[torch.Tensor]] = {}
        for gradient in self._gradients():
            by_share.setdefault(self._share(gradient), []).append(_local(gradient))
        # ``torch._foreach_*`` is what torch's own clipping and optimizers are made of: one kernel for
        # all gradients. The public ``get_total_norm`` would round bf16 norms to bf16.
        norms = [
            torch.stack(torch._foreach_norm(group, 2.0, dtype=torch.float32))
            .double()
            .square()
            .sum()
            * share
            for share, group in by_share.items()
        ]
        return torch.stack(norms).sum() if norms else torch.zeros((), device=self.device)

    def _scale(self, outcome: StepOutcome) -> float:
        """From the sum over tokens (averaged over ranks, by FSDP) to the mean, clipped."""
        scale = _over(self.ranks.size, outcome.tokens)
        if outcome.gradient_norm is not None and self._clip_grad_norm is not None:
            scale *= min(1.0, self._clip_grad_norm / (outcome.gradient_norm + 1e-6))
        return scale

    @torch.no_grad()
    def _scale_gradients(self, scale: float) -> None:
        self.phase = "gradient scaling"
        gradients = [_local(gradient) for gradient in self._gradients()]
        if self.device.type != "cpu" and gradients:
            self._insist(torch._foreach_mul_, gradients, scale)
        else:  # where foreach would round the number to the gradients' dtype first
            for gradient in gradients:
                self._insist(gradient.mul_, scale)

    def _insist(self, multiply: Callable[..., Any], *arguments: Any) -> None:
        """A product in place needs no memory. What may fail for want of it is the loading of its kernel,
        before anything is multiplied, so it is done again: the other ranks rely on this one's step by now."""
        try:
            multiply(*arguments)
        except Exception as error:
            if self._collectives is None or not is_out_of_memory(error):
                raise
            self.memory.release()
            multiply(*arguments)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _share(self, gradient: torch.Tensor) -> float:
        pieces = 1
        if isinstance(gradient, DTensor):
            for dim, placement in enumerate(gradient.placements):
                if isinstance(placement, Shard):
                    pieces *= gradient.device_mesh.size(dim)
        return pieces / self.ranks.size

    # --- out of memory ------------------------------------------------------------------------------

    def _do(self, segment: str, work: Callable[..., None], *arguments: Any) -> None:
        """One part of a pass: do it, or stand in for it if this rank has dropped out of the step."""
        if self._lost:
            return
        if self._failed_in is None:
            with self._collectives.segment(segment) if self._collectives else nullcontext():
                self._attempt(segment, work, *arguments)
        if self._failed_in is None or self._lost or self._collectives is None:
            return
        if self._collectives.recording:
            self._collectives.tell_failure()
            self._lost = True
        else:
            self._collectives.finish(segment)

    def _attempt(self, phase: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do something that can still be thrown away."""
        self.phase = phase
        try:
            with self.memory.running():
                return work(*arguments)
        except AnotherRankFailed:
            self._lost = True
        except Exception as error:
            if self._collectives is None or not is_out_of_memory(error):
                raise
            self._failed_in = phase
        # Only now is the exception gone, and with it the frames that held the step's tensors.
        self.forget()
        return None

    def forget(self) -> None:
        """Forget everything that the step has made on this rank."""
        self._loss = self._graph = None
        if isinstance(self._activations, OffloadActivations):
            self._activations = _fresh(self._activations)
        with self.memory.running():
            fsdp.reset(self.model)
        self.memory.release()

    def _lose(self) -> StepOutcome:
        failures = self.ranks.gather(self._failed_in)
        self.forget()
        self._new_retries()  # those of a lost step say nothing about the size that follows
        return StepOutcome(lost=True, failures=tuple(failures))


def _optimizer_state(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [
        value for state in states for value in state.values() if isinstance(value, torch.Tensor)
    ]


def _as_list(logits: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return logits if isinstance(logits, list) else [logits]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _over(number: float, tokens: float) -> float:
    """``number / tokens`` as torchtune's recipes round it: in float32, by way of the reciprocal."""
    return float(torch.tensor(max(tokens, 1), dtype=torch.float32).reciprocal() * number)


def _fresh(offloading: OffloadActivations) -> OffloadActivations:
    """An offloading context that remembers nothing of a failed step, on the stream of the old one."""
    fresh = OffloadActivations()
    if offloading.use_streams:
        fresh.s1 = offloading.s1  # another stream would be another pool of cached memory
    return fresh
