"""What a checkpoint says of training: one class, which alone knows how that is written and read."""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from torchtune_adaptive.common import CheckpointError

VERSION = 1
"""The version of what is written; the first had no number yet."""

T = TypeVar("T")


@dataclass(frozen=True)
class GrowthState:
    """The batch of a run, and how it has grown."""

    start: list[int]
    """Micro-batch, accumulation and ranks of the batch that the run began with."""
    global_batch: int
    largest: int | None
    """The largest micro-batch that fits, as a search found it; None if there was no search."""
    decisions: list[list[int]]
    """Samples and global batch, at each change."""
    schedule: dict[str, Any]


@dataclass(frozen=True)
class TrainingState:
    """Everything besides model and optimizer that a run needs to continue as if it had never stopped.

    Others only see what they read here; what is of type ``dict`` belongs to the object that made it.
    """

    global_step: int
    samples: int
    """Samples used since the run began, over all ranks."""
    samples_of_epoch: int
    validated: int
    """The last step after which the run was validated."""
    generators: list[dict[str, Any]]
    """The random number generators of each rank."""
    token_budget: list[list[int]] | None
    """Row lengths and rows; empty where a budget was found and given up."""
    knobs: dict[str, Any] | None
    """The memory knobs in use; None where they were not written yet."""
    growth: GrowthState
    learning_rate: dict[str, Any]
    noise: dict[str, Any] | None
    recovery: dict[str, Any] | None
    retried_steps: int
    allocation_retries: int

    def write(self) -> dict[str, Any]:
        """The state in types that a checkpoint may hold."""
        return {"version": VERSION, **vars(self), "growth": dict(vars(self.growth))}

    @classmethod
    def read(cls, saved: Any) -> TrainingState:
        """The state that ``write`` gave, in this version of the package or an earlier one.

        Raises:
            CheckpointError: a newer version wrote it, or it is damaged.
        """
        if not isinstance(saved, dict):
            raise _damaged("all of it", saved)
        version = saved.get("version", VERSION)
        if not isinstance(version, int):
            raise _damaged("version", version)
        if version > VERSION:
            raise CheckpointError(
                f"The checkpoint's training state has version {version}, and this torchtune-adaptive reads "
                f"up to {VERSION}. Resume with the newer torchtune-adaptive that saved it."
            )
        # Version 0.1.0 had neither of these, and of what recovery gave up it had sizes only.
        values = {"knobs": None, "validated": saved.get("global_step"), **saved}
        if isinstance(recovery := values.get("recovery"), dict):
            given_up = recovery.get("given_up", ())
            given_up = [[each, 0] if isinstance(each, int) else each for each in given_up]
            values["recovery"] = {"relief": 0, **recovery, "given_up": given_up}
        if isinstance(growth := values.get("growth"), dict):
            values["growth"] = _made(GrowthState, growth)
        return _made(cls, values)


def _made(kind: type[T], values: dict[str, Any]) -> T:
    expected = get_type_hints(kind)
    for name in expected:
        if name not in values:
            raise _damaged(name, None)
        if not _is(values[name], expected[name]):
            raise _damaged(name, values[name])
    return kind(**{name: values[name] for name in expected})


def _damaged(name: str, found: Any) -> CheckpointError:
    what = "missing" if found is None else repr(found)[:80]
    return CheckpointError(
        f"The checkpoint's training state is damaged: {name} is {what}. Resume from another checkpoint."
    )


def _is(value: Any, expected: Any) -> bool:
    """Whether a value is of an annotated type, whatever is in it."""
    if isinstance(expected, UnionType):
        return any(_is(value, each) for each in get_args(expected))
    return isinstance(value, get_origin(expected) or expected)
