"""Predict the memory of a training step, without a GPU, weights, or other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.common import arguments
from torchtune_adaptive.library.step_questions import (
    ANY_LENGTH,
    EVEN,
    WORST,
    StepQuestion,
    step_question,
)
from torchtune_adaptive.planner import Machine, Speed, TracedRun, call_alone

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from torchtune_adaptive.library.model_steps import StepsOfModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoutedPlan:
    """The memory of a mixture of experts where its routers send tokens in one way."""

    peak: int
    """The peak, in bytes."""
    largest: int
    """The largest micro-batch that fits."""


@dataclass(frozen=True)
class ExpertsPlan:
    """The memory of a mixture of experts, by where its routers send tokens; mostly it does not matter."""

    even: RoutedPlan
    """All experts get as many rows."""
    worst: RoutedPlan
    """All tokens go to the same experts."""

    @property
    def differ(self) -> bool:
        """Whether routing changes the memory."""
        return self.even != self.worst


@dataclass(frozen=True)
class Plan:
    """The memory and the time that a training step will take."""

    largest: int
    """The largest micro-batch that fits, in rows, up to the ceiling; 0 if not even one row does."""
    rows: int
    """The micro-batch that the peak is for: the one asked for, or else the largest."""
    peak: int
    """The most memory that is reserved in a step, in bytes, on the rank with the largest share."""
    parts: dict[str, int]
    """Bytes of tensors at the peak, by what they are for; logits and loss are among the activations."""
    usable_bytes: int
    """Usable memory, in bytes: what the peak must stay within."""
    assumptions: tuple[str, ...]
    """Assumptions about the device and the step."""
    speed: Speed | None = None
    """The speed at ``rows``: tokens or rows per second, utilization, where the time goes, and how far off it
    may be; None if nothing is known about the device's."""
    allocated: int = 0
    """The most memory that tensors take in a step, in bytes, as ``torch.cuda.max_memory_allocated`` counts
    it; the allocator reserves more."""
    with_retries: bool = False
    """Whether the peak is above the usable memory, but a step runs if torch's allocator returns memory in the
    middle of it."""
    experts: ExpertsPlan | None = None
    """What a mixture of experts takes where routers send as many tokens to all (``experts.even``) and where
    they send all to the same (``experts.worst``): each has a ``peak`` and a ``largest``. The plan is that of
    the higher peak, and its speed is that of even routing. None for other models."""
    unchecked: str = ""
    """What is said where ``largest`` follows from remembered traces, and was not traced itself."""


def plan_batch_size(
    build: Callable[[], nn.Module],
    *,
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer],
    forward: Callable[[nn.Module, Any], tuple[torch.Tensor, int]],
    worst_case: Callable[[int], Any],
    gpu: str = "h100-80gb",
    memory: int | str | None = None,
    ranks: int = 1,
    rows: int | None = None,
    ceiling: int = 1 << 14,
    accumulation: int = 1,
    max_grad_norm: float | None = None,
    headroom: float = 0.05,
    length: int = 1,
    machine: Machine | None = None,
    timeout: float = 600.0,
) -> Plan:
    """Predict the peak memory of a training step, the largest micro-batch that fits, and the speed.

    The step that trains is traced on fake tensors, in a process of its own: tracing registers a device and
    fake ranks with torch and replaces some of its functions, which cannot be undone. So functions must be
    ones that another process can import: written with ``def`` at the top level of a module or script, whose
    own work is under ``if __name__ == "__main__"``. ``functools.partial`` gives them arguments.

    Args:
        build: function that makes the model, and applies ``fully_shard`` as training does, on the meta device
            and with ``ranks`` fake ranks. A mesh must be for ``torch.accelerator.current_accelerator()``.
        optimizer: function called with the model's parameters.
        forward: function called with the model and a micro-batch; returns the loss, summed, and the number of
            terms.
        worst_case: function that makes a micro-batch of so many rows on the host, each as long as the data
            can make it.
        gpu: the GPU, by a name that ``tune-adaptive plan --list-gpus`` shows; ``"cpu"`` is the device that
            ``AdaptiveStep(memory_limit=...)`` simulates.
        memory: the capacity of one process, such as ``"24GiB"``, if it is not that of the GPU.
        ranks: the number of ranks.
        rows: the micro-batch whose peak is wanted; by default, the largest that fits.
        ceiling: the largest micro-batch to consider.
        accumulation: micro-batches in a step.
        max_grad_norm: the norm above which gradients are scaled down.
        headroom: the share of the capacity that must stay free.
        length: the tokens in a row, so that the speed is in tokens; by default, it is in rows.
        machine: the machine around the GPU, on which the speed depends; by default, what is usual.
        timeout: seconds that tracing may take.

    Raises:
        UsageError: the arguments do not work together.
        NoPrediction: the step cannot be traced; the message says why.
    """
    question = step_question(
        build,
        optimizer=optimizer,
        forward=forward,
        worst_case=worst_case,
        gpu=gpu,
        memory=memory,
        ranks=ranks,
        rows=rows,
        ceiling=ceiling,
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
        headroom=headroom,
        length=length,
        machine=machine,
    )
    arguments.seconds("timeout", timeout)
    log.info(f"Tracing a step in a process of its own, for at most {timeout:g} s.")
    return call_alone(_answer, question, timeout=timeout)


def _answer(question: StepQuestion) -> Plan:
    """Predict, in a process that does nothing else."""
    from torchtune_adaptive.library.model_steps import StepsOfModel
    from torchtune_adaptive.planner import check_sums

    if question.asked.device.caching:
        check_sums()
    steps = StepsOfModel(question, EVEN)
    even = _found(steps, question)
    if not steps.has_experts:
        return even
    worst = even
    if steps.routing_matters:
        log.info("Memory follows from how many rows each expert gets: tracing the worst case, too.")
        worst = _found(StepsOfModel(question, WORST), question)
    more = max(even, worst, key=lambda plan: plan.peak)
    experts = ExpertsPlan(*(RoutedPlan(each.peak, each.largest) for each in (even, worst)))
    least = min(even.largest, worst.largest)
    return replace(more, largest=least, speed=even.speed, experts=experts)


def _found(steps: StepsOfModel, question: StepQuestion) -> Plan:
    asked = question.asked
    if asked.pace:
        pace = replace(asked.pace, compiled=bool(steps.as_written), experts=steps.has_experts)
        asked = replace(asked, pace=pace)
    found = TracedRun(steps, ANY_LENGTH).answer(asked)
    return Plan(
        found.largest,
        found.peak.rows,
        found.peak.reserved,
        found.peak.parts,
        asked.device.usable_bytes,
        (*question.assumptions, *filter(None, [found.as_written])),
        found.speed,
        found.peak.allocated,
        found.peak.with_retries,
    )
