"""What a step costs on a real device: healthy, beside a plain loop, and lost, by part; and its bits.

    python benchmarks/gpu_step.py                # about 2, 20 and 100 ms a step
    python benchmarks/gpu_step.py --device cpu   # a rehearsal with small models

Four loops train the same model on the same rows, in turns: a plain one, `TrainStep` without recovery and
with it, and `AdaptiveStep`. They do the same arithmetic: losses and gradients are sums, divided once. The
rows of a step are doubled until the plain loop takes as long as it should.

Then memory runs out in the middle of a forward and of a backward pass, by an error that is raised there, as
the allocator would. The parts of such a step are timed: until the failure, giving memory back, the step again
in smaller micro-batches. One rank has no collectives to complete. At last the gradients of such a step are
compared with those of a plain loop in micro-batches of that size, with deterministic algorithms; and, to see
that the comparison can tell, with those of a plain loop in larger ones.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic algorithms need

import torch
from gpu_facts import tell
from torch import nn
from torchtune.models.llama2 import llama2

from torchtune_adaptive import AdaptiveStep
from torchtune_adaptive.common import counted
from torchtune_adaptive.core import Ranks, StepOptions, TrainStep, device_memory
from torchtune_adaptive.core.step.objective import Summed

TARGETS = {"cuda": (0.002, 0.02, 0.1), "cpu": (0.02,)}
"""Seconds that a step of the plain loop should take."""
SHAPES = {0.002: (2, 128, 128), 0.02: (8, 1024, 512), 0.1: (16, 2048, 512)}
"""Layers, width and tokens in a row, by these seconds."""
WORDS = 1024
MOST_ROWS = 128
ROUNDS = 7
"""Of steps of each loop, in turns."""
Step = Callable[[], object]


def model_of(seconds: float, device: torch.device) -> nn.Module:
    layers, width, _ = SHAPES[seconds] if device.type == "cuda" else (2, 64, 32)
    torch.manual_seed(0)
    with device:
        model = llama2(WORDS, layers, max(1, width // 64), max(1, width // 64), width, 512)
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)


def rows_of(seconds: float, device: torch.device, rows: int) -> list[torch.Tensor]:
    length = SHAPES[seconds][2] if device.type == "cuda" else 32
    generator = torch.Generator().manual_seed(1)
    return [*torch.randint(0, WORDS, (rows, length), generator=generator)]


def summed_loss(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
    return loss, tokens[:, 1:].numel()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


class Objective:
    """The loss of these rows, as `TrainStep` takes it."""

    ignored, unit = -100, "tokens"
    metrics = ()
    frozen = ()

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def rows(self, batch: Any) -> int:
        return len(batch)

    def weight(self, batch: Any) -> int:
        return batch[:, 1:].numel()

    def summed_loss(self, forward: Any, batch: Any, weight: int) -> Summed:
        return Summed(summed_loss(self._model, batch)[0])


def plain(model: nn.Module, rows: list[torch.Tensor], size: int) -> Step:
    optimizer = optimizer_of(model)

    def take() -> None:
        accumulate(model, rows, size)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return take


def accumulate(model: nn.Module, rows: list[torch.Tensor], size: int) -> None:
    """Leave the gradient of the mean loss in ``.grad``, as a loop does that logs each loss."""
    device = next(model.parameters()).device
    terms, total = 0, torch.zeros((), device=device)
    for start in range(0, len(rows), size):
        loss, weight = summed_loss(model, torch.stack(rows[start : start + size]).to(device))
        loss.backward()
        terms, total = terms + weight, total + loss.detach()
    float(total)
    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 1 / terms)


def train_step(model: nn.Module, rows: list[torch.Tensor], size: int, survive: bool) -> Step:
    device = next(model.parameters()).device
    step = TrainStep(
        model=model,
        objective=Objective(model),
        optimizers=[optimizer_of(model)],
        device=device,
        memory=device_memory(device),
        ranks=Ranks(),
        options=StepOptions(survive=survive),
    )

    def take() -> None:
        for start in range(0, len(rows), size):
            step.forward_backward(torch.stack(rows[start : start + size]))
        assert not step.apply().lost

    return take


def adaptive_step(model: nn.Module, **options: Any) -> AdaptiveStep:
    forward = partial(summed_loss, model)
    return AdaptiveStep(model, optimizer_of(model), forward, **options)


def seconds_of(take: Step, device: torch.device, times: int) -> tuple[float, float]:
    """Seconds of a step, and of this thread in it."""
    started, of_thread = clock(device), time.thread_time()
    for _ in range(times):
        take()
    of_thread = time.thread_time() - of_thread
    return (clock(device) - started) / times, of_thread / times


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def rows_for(seconds: float, device: torch.device) -> int:
    """The rows with which a step of the plain loop takes about so long."""
    rows = 1
    while rows < MOST_ROWS:
        take = plain(model_of(seconds, device), rows_of(seconds, device, rows), rows)
        for _ in range(3):
            take()
        if seconds_of(take, device, 3)[0] >= 0.75 * seconds:
            break
        rows *= 2
    return rows


def healthy(seconds: float, device: torch.device, rows: int) -> None:
    """Compare steps in which nothing fails."""
    data = rows_of(seconds, device, rows)
    model = model_of(seconds, device)
    adaptive = adaptive_step(copy.deepcopy(model))
    loops: dict[str, Step] = {
        "plain": plain(copy.deepcopy(model), data, rows),
        "TrainStep without recovery": train_step(copy.deepcopy(model), data, rows, survive=False),
        "TrainStep": train_step(copy.deepcopy(model), data, rows, survive=True),
        "AdaptiveStep": lambda: adaptive(data, torch.stack, rows),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for take in loops.values():
        for _ in range(3):
            take()
    times = max(2, min(50, round(0.1 / seconds)))
    for number in range(ROUNDS):
        turn = number % len(loops)
        for name in [*loops][turn:] + [*loops][:turn]:
            found[name].append(seconds_of(loops[name], device, times))
    base = found["plain"]
    took, of_thread = (1000 * statistics.median(each) for each in zip(*base, strict=True))
    print(
        f"\nplain, {rows} rows: {took:.2f} ms a step, {of_thread:.2f} ms of the thread", flush=True
    )
    for name in [*loops][1:]:
        ratios = [mine[0] / plain[0] for mine, plain in zip(found[name], base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        added = [1000 * (mine[1] - plain[1]) for mine, plain in zip(found[name], base, strict=True)]
        said = (
            f"{middle:.3f} of plain ({low:.3f} to {high:.3f}), {statistics.median(added):+.3f} ms of the "
            "thread"
        )
        print(f"{name}: {said}", flush=True)
        tell(f"{name}, {took:.1f} ms a step", said)


@contextmanager
def out_of_memory_once(model: nn.Module, stage: str) -> Iterator[None]:
    """Memory runs out once in the middle of a pass, in the second micro-batch of a step."""
    layer, left = model.layers[len(model.layers) // 2], [2]  # type: ignore[index]

    def count(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("injected")

    of_forward = stage == "forward"
    hook = (layer.register_forward_pre_hook if of_forward else layer.register_full_backward_hook)(
        count
    )
    try:
        yield
    finally:
        hook.remove()


def lost(seconds: float, device: torch.device, rows: int) -> None:
    """Time the parts of a step in which memory runs out, in its second micro-batch of two."""
    size = max(2, rows)
    data = rows_of(seconds, device, 2 * size)
    print(f"\nout of memory in the second of two micro-batches of {size} rows", flush=True)
    for stage in ("forward", "backward"):
        step = adaptive_step(model_of(seconds, device))
        take: Step = partial(step, data, torch.stack, size)
        for _ in range(3):
            take()
        undisturbed = 1000 * seconds_of(take, device, 3)[0]
        marks, forget = [], step.train_step.forget

        def timed(marks: list[float] = marks, forget: Callable[[], None] = forget) -> None:
            marks.append(clock(device))
            forget()
            marks.append(clock(device))

        with (
            out_of_memory_once(step.train_step.model, stage),
            patch.object(step.train_step, "forget", timed),
            patch.object(step.train_step._failures, "forget", timed),
        ):
            started = clock(device)
            outcome = step(data, torch.stack, size)
            ended = clock(device)
        assert outcome.retried == 1, "nothing has failed"
        given_back = sum(marks[1::2]) - sum(marks[::2])
        parts = {
            "until it failed": marks[0] - started,
            "memory given back": given_back,
            f"again in {counted(outcome.micro_batch, 'row')}": ended - marks[0] - given_back,
        }
        said = ", ".join(f"{part} {1000 * took:.1f} ms" for part, took in parts.items())
        said += f"; undisturbed {undisturbed:.1f} ms"
        print(f"in {stage}: {said}", flush=True)
        tell(f"out of memory in {stage}, {undisturbed:.1f} ms a step", said)


def bits(seconds: float, device: torch.device) -> None:
    """Compare the gradients of a step that was done again with those of a plain loop.

    Not weights: the first step of AdamW is nearly the sign of the gradient, which hides a difference.

    It is done again in single rows: with 1,025 to 3,072 tokens in a micro-batch, torch's gradient of an
    embedding is not the same each time, not even with deterministic algorithms.
    """
    rows = 4
    data, model = rows_of(seconds, device, rows), model_of(seconds, device)
    torch.use_deterministic_algorithms(True)
    try:
        step = adaptive_step(model, optimizer_steps=False)
        with out_of_memory_once(model, "backward"):
            outcome = step(data, torch.stack, rows // 2)
        assert outcome.retried == 1, "nothing has failed"
        retried = taken_gradients(model)
        equal = []
        for size in (outcome.micro_batch, rows):
            accumulate(model, data, size)
            pairs = zip(retried, taken_gradients(model), strict=True)
            equal.append(sum(torch.equal(mine, theirs) for mine, theirs in pairs))
    finally:
        torch.use_deterministic_algorithms(False)
    said = (
        f"{equal[0]} of {len(retried)} gradients have the bits of plain accumulation in "
        f"{counted(outcome.micro_batch, 'row')}; {equal[1]} those of {rows} rows at once"
    )
    print(f"\na step done again: {said}")
    tell("bits of a step that was done again", said)


def taken_gradients(model: nn.Module) -> list[torch.Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = torch.device(arguments.parse_args().device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}", flush=True)
    for seconds in TARGETS[device.type]:
        rows = rows_for(seconds, device)
        healthy(seconds, device, rows)
        lost(seconds, device, rows)
    bits(TARGETS[device.type][-1], device)


if __name__ == "__main__":
    main()
