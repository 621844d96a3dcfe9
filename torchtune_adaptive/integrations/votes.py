"""Collectives of a trainer's own, for metrics, in its forward pass: on all ranks of a step, or on none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torchtune_adaptive.library import AdaptiveStep

_LAUNCHING = ("gather", "reduce", "pad_across_processes")
"""Methods of an accelerator that launch one; ``gather_for_metrics`` calls the first."""


@contextmanager
def voting(accelerator: Any, step: AdaptiveStep) -> Iterator[None]:
    """A context in which the accelerator launches collectives where all ranks of the step arrive."""
    voted: dict[str, Callable[..., Any]] = {
        name: partial(step.collective, getattr(accelerator, name)) for name in _LAUNCHING
    }
    vars(accelerator).update(voted)
    try:
        yield
    finally:
        for name in voted:
            del vars(accelerator)[name]
