"""What is asked about a program, and the answer. No torch in here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtune_adaptive.planner.memory.gpus import Gpu
from torchtune_adaptive.planner.memory.peak import DeviceLimits
from torchtune_adaptive.planner.memory.planned import planned_gpu
from torchtune_adaptive.planner.speed.machine import Machine
from torchtune_adaptive.planner.speed.speed import Pace
from torchtune_adaptive.planner.traced_run import Answer

GENERATION = "generation"
"""The part of a step in which a model generates what the step is about."""


@dataclass(frozen=True)
class Program:
    """A program, and what is known of its run."""

    words: tuple[str, ...]
    """A script, ``-m`` and a module, or a command of an installed package; and its arguments."""
    gpu: Gpu
    ranks: int | None = None
    """The number of GPUs, each of which is a rank of the program; None for as many as its launcher says."""
    rows: int | None = None
    """Rows of a batch, if not the program's own."""
    length: int | None = None
    """Tokens of a row, if not those of its longest row."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Values that the program asks for and nobody knows, by the place where it does."""
    made_up: bool = False
    """Whether its rows are made up, as long as its arguments allow."""
    title: str = ""
    """What it is called, if not by its words."""
    shows: bool = False
    """Whether what it prints is shown, with the traceback where it fails."""
    ceiling: int = 1 << 11
    """The largest batch that is considered."""
    cache: bool | str = True
    """Where its runs are remembered: in the user's cache, in another folder, or not."""

    @property
    def name(self) -> str:
        return self.title or " ".join(self.words[: 1 + (self.words[0] == "-m")])


class Seen(NamedTuple):
    """What a program's batches are like."""

    rows: int
    """The rows that the program has in a batch."""
    tokens: int
    """The tokens of a row; 1 where rows are none of tokens."""
    looked_at: int
    """The rows among which the longest was looked for."""
    read: int = 0
    """The rows that were read of a dataset with more; 0 if all were."""
    there: int = 0
    """The rows of that dataset."""
    unit: int = 1
    """What the rows are a multiple of: texts that are generated for one prompt, say."""
    shared: int = 1
    """The passes over the model that are made with the rows of one batch, each with others of them."""


class About(NamedTuple):
    """What a run of a program has shown besides its steps."""

    seen: Seen | None = None
    """None where its batches are not made by a loader, so that they cannot have other rows."""
    compiles: bool = False
    """Whether it compiles something, which is planned as if it did not."""
    uncounted: tuple[str, ...] = ()
    """Kernels of its own that multiply matrices, of whose time only that of reading and writing is known."""
    quantized: bool = False
    """Whether weights have few bits, with which the allocator's memory is predicted less exactly."""
    generated: int = 0
    """The most tokens that a model generates for a text."""
    card: str = ""
    """The GPU, where memory follows from more of it than its capability: vLLM takes a share of its memory,
    and some kernels allocate by its multiprocessors."""
    choices: tuple[tuple[str, str], ...] = ()
    """How a router, say, chose by scores that nobody knows, by the place, where more depends on that."""
    notes: tuple[str, ...] = ()
    """What else its answer says."""
    holders: int = 1
    """Ranks that hold parts of one model, and so train on the same rows."""


class ProgramPlan(NamedTuple):
    """The memory and the speed of a program's steps, on each device that was asked about."""

    answers: Sequence[Answer]
    ranks: int
    micro_batches: int
    """Their number in a step."""
    about: About
    unchecked: str = ""
    """What is said where the largest batch follows from remembered runs, and was not run itself."""


Devices = Callable[[int], Sequence[tuple[DeviceLimits, Pace | None]]]
"""What gives devices, and what their speed follows from if that is known, by the number of ranks. Another
process can import it."""


@dataclass(frozen=True)
class OnGpus:
    """The devices of GPUs, whatever the number of ranks."""

    planned: Gpu
    machine: Machine
    headroom: float
    memory: int | None = None
    """The capacity of the planned one, if told."""
    paced: bool = True
    """Whether it is a GPU that is named, so that its speed may be known."""
    others: tuple[Gpu, ...] = ()

    def __call__(self, ranks: int) -> list[tuple[DeviceLimits, Pace | None]]:
        first, _ = planned_gpu(self.planned, ranks, self.headroom, self.memory)
        found = [(first, _pace(self.planned, ranks, self.machine) if self.paced else None)]
        for kind in self.others:
            device, _ = planned_gpu(kind, ranks, self.headroom)
            found.append((device, _pace(kind, ranks, self.machine.for_other_gpus)))
        return found


def _pace(kind: Gpu, ranks: int, machine: Machine) -> Pace | None:
    """What the speed on a GPU follows from, if that is known."""
    speeds = machine.speeds(kind.name)
    return Pace(speeds, ranks, compiled=False, quantized=False, dtype="") if speeds else None


CHECKPOINTED = "checkpointing: every layer"
"""The note of a trainer that checkpoints."""
ROWS = "per_device_train_batch_size"
_TRAINER = "torchtune_adaptive.planner.programs.trainer"
_OF_ANY_ROWS = (
    "Trainer",
    "Seq2SeqTrainer",
    "SFTTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "RewardTrainer",
)
"""Trainers of which nothing but the batches depends on the rows of a batch."""


def of_trainer(settings: Mapping[str, Any], gpu: Gpu, **others: Any) -> Program:
    """The program that trains with a trainer of transformers or TRL as settings say, of which ``trainer`` and
    ``folder`` are two; ``others`` are those of the program."""
    rows = settings.get(ROWS) if settings["trainer"] in _OF_ANY_ROWS else None
    words = words_of_trainer(settings)
    return Program(words, gpu, rows=rows, title=settings["trainer"], made_up=True, **others)


def words_of_trainer(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The words of that program. What is remembered of it serves any number of rows, if these are no part."""
    left_out = ROWS if settings["trainer"] in _OF_ANY_ROWS else None
    given = {name: value for name, value in settings.items() if name != left_out}
    return "-m", _TRAINER, json.dumps(given, sort_keys=True)
