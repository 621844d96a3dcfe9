"""The phases of a rollout besides training, on the fake device: what a search tries is what is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from torchtune_adaptive.core import TrainStep
from torchtune_adaptive.recipe.kinds.generating import Generating
from torchtune_adaptive.recipe.rollout import generate, score
from torchtune_adaptive.recipe.rollout.phases import rollout_sizes
from torchtune_adaptive.recipe.rollout.rows import Row, longest_rows
from torchtune_adaptive.recipe.settings.phase_names import GATHERING, SCORING, SHARDED_GENERATION

_TOKENIZER = SimpleNamespace(pad_id=0, stop_tokens=[0])
"""A stand-in for the tokenizer. Of stop tokens that the config does not name, it has one; each more takes 8
bytes in generation."""
_NUMPY = {torch.float32: np.float32, torch.int64: np.int64}
_NextPart = Callable[[], None]


def work_of_phase(
    kind: Generating,
    step: TrainStep,
    name: str,
    size: tuple[int, int],
    making_caches: Callable[[], None],
) -> Callable[[_NextPart], Any]:
    """What a trial of a phase does; see ``StepTracer.trace_forward``. Each token is a part.

    Args:
        kind: the kind of recipe.
        step: its step, whose tensors are fake.
        name: the phase.
        size: the rows in a micro-batch, and the tokens of the longest prompt with the longest response.
        making_caches: called before the caches of keys and values are allocated.
    """
    rows, length = size
    sizes = rollout_sizes(kind.asked)
    phases = kind.phases(step.model, step, _TOKENIZER, sizes, longest=length - sizes.max_new)
    made = longest_rows(rows, phases.longest, sizes.max_new, phases.values)
    if name == SCORING:
        return lambda _: phases.scoring.attempt(made)
    generation = phases.generation
    if name == GATHERING:
        return lambda _: _gather(step, generation.gathers)

    def tried(rows: Sequence[Row]) -> Any:
        making_caches()
        return phases.generator.trial(rows)

    gathers = None if name == SHARDED_GENERATION else generation.gathers
    return lambda next_token: _by_token(
        phases.generator.model,
        lambda: replace(generation, gathers=gathers, tried=tried).attempt(made),
        next_token,
    )


def _gather(step: TrainStep, policy: nn.Module | None) -> None:
    assert policy is not None, "the policy of several ranks is sharded"
    with step.gathered(policy):
        pass


def _by_token(policy: nn.Module, attempt: Callable[[], Any], next_token: _NextPart) -> None:
    """Generate, and tell where each token but the first begins."""
    passes = 0

    def begins(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes > 1:
            next_token()

    hook = policy.register_forward_pre_hook(begins, prepend=True)  # before FSDP's, which gather
    try:
        attempt()
    finally:
        hook.remove()


@contextmanager
def copying_no_values() -> Iterator[None]:
    """A context in which what phases copy to the host has no values: fake tensors have none."""
    with (
        mock.patch.object(generate, "on_host", _on_host),
        mock.patch.object(score, "on_host", _on_host),
    ):
        yield


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    kind = _NUMPY[tensor.cpu().dtype]
    return torch.from_numpy(np.empty(tensor.shape, kind))  # no memory of the simulated device
