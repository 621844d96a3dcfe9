"""Questions about a training step, for the process that traces it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.common import ConfigError, UsageError, arguments
from torchtune_adaptive.planner import (
    DeviceLimits,
    Machine,
    Pace,
    Question,
    gpus,
    planned_gpu,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

ANY_LENGTH = 1
"""Length that stands for rows as long as ``worst_case`` makes them."""

EVEN, WORST = "even", "worst"
"""Routings: all experts get as many rows, or all tokens go to the same experts, each with all tokens. All
ranks but those of expert parallelism compute all experts for their own rows, so no routing gives one more.
Which of the two takes more memory depends on what an expert that gets rows allocates."""

TRACED_MICRO_BATCHES = 3
"""The most micro-batches of a step that are traced: the first, which finds no gradients; one between,
which is like all others there; and the last, in which DDP reduces gradients."""


@dataclass(frozen=True)
class StepQuestion:
    """A question about a step."""

    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]
    forward: Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
    worst_case: Callable[[int], Any]
    ranks: int
    max_grad_norm: float | None
    asked: Question
    assumptions: tuple[str, ...]


def step_question(
    build: Callable[[], nn.Module],
    *,
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer],
    forward: Callable[[nn.Module, Any], tuple[torch.Tensor, int]],
    worst_case: Callable[[int], Any],
    gpu: str,
    memory: int | str | None,
    ranks: int,
    rows: int | None,
    ceiling: int,
    accumulation: int,
    max_grad_norm: float | None,
    headroom: float,
    length: int = 1,
    machine: Machine | None = None,
) -> StepQuestion:
    """The question that the arguments of ``plan_batch_size`` ask.

    Raises:
        UsageError: they do not work together.
    """
    functions = {
        "build": build,
        "optimizer": optimizer,
        "forward": forward,
        "worst_case": worst_case,
    }
    for name, function in functions.items():
        _require_importable(name, function)
    ranks, ceiling = arguments.whole("ranks", ranks), arguments.whole("ceiling", ceiling)
    accumulation = arguments.whole("accumulation", accumulation)
    if rows is not None:
        rows = arguments.whole("rows", rows)
    length = arguments.whole("length", length)
    arguments.norm("max_grad_norm", max_grad_norm)
    headroom = arguments.share("headroom", headroom)
    bytes_given = arguments.memory("memory", memory)
    if gpu != "cpu":
        machine = machine or Machine()
        try:
            kind = gpus.gpu(gpu, "gpu", "memory")
            speeds = machine.speeds(kind.name)
        except ConfigError as error:  # which is for configs
            raise UsageError(str(error)) from None
        device, assumptions = planned_gpu(kind, ranks, headroom, bytes_given)
        assumptions = (*assumptions, *machine.lines(kind.name, ranks))
        if speeds is not None and speeds.assumed:
            assumptions = (*assumptions, f"speed: of {speeds.name}, {speeds.assumed}")
    elif machine is not None and machine.is_told:
        raise UsageError(
            "machine: the device that gpu='cpu' simulates has none around it. Name a GPU, or leave machine "
            "out."
        )
    elif bytes_given is not None:
        device, assumptions = DeviceLimits.simulated(bytes_given, headroom), ()
        speeds = Machine.simulated()
    else:
        raise UsageError("memory: a CPU has none of its own to plan for. Pass memory='1GiB', say.")
    return StepQuestion(
        build=build,
        optimizer=optimizer,
        forward=forward,
        worst_case=worst_case,
        ranks=ranks,
        max_grad_norm=max_grad_norm,
        asked=Question(
            device=device,
            rows=rows,
            length=ANY_LENGTH,
            micro_batches=accumulation,
            pace=Pace(speeds, ranks, compiled=False, quantized=False, dtype="") if speeds else None,
            ceiling=ceiling,
            confirmed=True,
            tokens=length,
        ),
        assumptions=assumptions,
    )


def _require_importable(name: str, function: object) -> None:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        raise UsageError(
            f"{name}: {function!r} cannot be imported by the process that traces. Define it with def at the "
            "top level of a module; functools.partial gives it arguments."
        ) from None
    defined_in = getattr(getattr(function, "func", function), "__module__", "")
    if defined_in == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise UsageError(
            f"{name}: it is defined in an interactive session, which the process that traces cannot import. "
            "Put it into a module."
        )
