"""What can be chosen on the page of a plan, and what is known of each choice."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.planner import gpus, step_table

GPUS = (
    "rtx4090-24gb",
    "rtx5090-32gb",
    "l40s-48gb",
    "a100-80gb",
    "h100-80gb",
    "h200-141gb",
    "b200-192gb",
    "mi300x-192gb",
)
"""GPUs to choose from, beside the one that is asked for, unless others are named."""
_RANKS = (1, 2, 4, 8)
_MACHINE = ("nodes", "power", "links", "network", "machine")
_OTHER_KERNELS = (
    "GPUs older than Ampere compute attention by other kernels, so they have pages of their own"
)
NOT_FINISHED = "not finished"
"""The reason why there is no answer to a question that was interrupted."""


@dataclass(frozen=True)
class PageChoice:
    """A length of rows, a number of GPUs and a kind of checkpointing, with all micro-batches and GPUs."""

    length: int
    ranks: int
    checkpointing: str
    """Whether activations are computed again, for people."""
    overrides: str
    """What to type for it beside the length and the number of GPUs."""
    table: step_table.StepTable
    other_rank: step_table.StepTable | None = None
    """The table of the rank with another share of the parameters, if there is one."""


@dataclass(frozen=True)
class Page:
    """All that a page knows."""

    subject: str
    """The name of what is planned."""
    command: str
    """What to type for it; the page adds what is chosen there."""
    rows_key: str
    """The setting that has the rows of a micro-batch."""
    rows: int
    """The rows that the user asks for."""
    accumulation: int
    """Micro-batches in a step."""
    devices: Sequence[tuple[str, str]]
    """The GPUs to choose from, in the order of the tables: the name of each, and what to type for it."""
    device: int
    """The place of the one that the user asks for."""
    choices: Sequence[PageChoice]
    """The choices, that of the user first."""
    assumptions: Sequence[str]
    missing: Sequence[str]
    """Choices without an answer, each with the reason."""


def offered_gpus(name: str, names: Iterable[str] = GPUS) -> tuple[str, ...]:
    """The names of GPUs to choose from, the one that is asked for among them. If that is not known by
    name, as where an amount of memory is told, there is no choice. GPUs older than Ampere have no page with
    others, as their steps take other memory."""
    if name not in gpus.GPUS:
        return (name,)
    found = {name, *(gpus.gpu(each).name for each in names)}
    old = gpus.GPUS[name].before_ampere
    return tuple(
        each for each, gpu in gpus.GPUS.items() if each in found and gpu.before_ampere == old
    )


def not_offered(before_ampere: bool, compare: str | None) -> list[str]:
    """The GPUs of ``--compare`` that cannot be on the page of an older or a newer one, with the reason."""
    others = (each for each in names_in(compare) if gpus.is_before_ampere(each) != before_ampere)
    return [f"{each}: {_OTHER_KERNELS}" for each in others]


def other_numbers_of_gpus(ranks: int, multiple_of: int = 1) -> list[int]:
    return sorted(n for n in {*_RANKS, 2 * ranks} - {ranks} if n % multiple_of == 0)


def words_for_gpu(name: str, arguments: argparse.Namespace) -> str:
    """What to type for a GPU."""
    options = ["--gpu", name]
    if name not in gpus.GPUS:  # an amount of memory, or what was measured
        given = {"--memory": arguments.memory, "--gpu": arguments.gpu}
        options = [word for pair in given.items() if pair[1] for word in pair]
    return shlex.join(options)


def words_for_machine(arguments: argparse.Namespace) -> list[str]:
    """What was typed about the machine."""
    given = ((option, getattr(arguments, option)) for option in _MACHINE)
    return [
        word for option, value in given if value is not None for word in (f"--{option}", str(value))
    ]


def names_in(compare: str | None) -> list[str]:
    """The GPUs that ``--compare`` names."""
    return [name.strip() for name in (compare or "").split(",") if name.strip()]


def names_to_choose(compare: str | None) -> tuple[str, ...]:
    """The GPUs to choose from on a page: those that ``--compare`` names, or those that it has by default."""
    return tuple(name for name in names_in(compare) if name != gpus.HERE) or GPUS


def require_file(path: Path) -> None:
    """Check that a page can be written, before anything is traced.

    Raises:
        ConfigError: it cannot.
    """
    if path.is_dir() or not path.parent.is_dir():
        in_none = f"is in a folder that does not exist ({path.parent})"
        reason = "is a folder" if path.is_dir() else in_none
        raise ConfigError("--html", str(path), reason, "Name a file")
