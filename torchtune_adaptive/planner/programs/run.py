"""Runs a program on the fake device, in a process that does nothing else.

The program runs as it would by itself until it makes its first model. From there, forks of it run on, each
with other rows or another number of layers, and end after the third step of the optimizer. Meanwhile

- ``surroundings`` takes what it writes, and keeps it from the network; ``hub`` from downloading weights,
- ``commands`` launches in this process what it would in others,
- ``device`` shows it a GPU, and ``autocast`` what that casts,
- ``models`` makes models without weights, and ``quantized`` lets these have few bits,
- ``kernels``, ``flash``, ``flex`` and ``registered`` see the kernels that it launches,
- ``loader`` makes its batches, ``made_up`` rows where a trainer's file is planned, and ``generation`` texts
  of its models,
- ``known`` records what it does on the device, and computes what follows from data; ``unknown`` is about what
  does not,
- ``steps`` cuts that into steps.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.memory.peak import StartUp
from torchtune_adaptive.planner.memory.recorded_step import NotRegular, RecordedStep
from torchtune_adaptive.planner.private import replaced
from torchtune_adaptive.planner.programs import (
    autocast,
    commands,
    device,
    hub,
    kernels,
    made_up,
    notes,
    quantized,
    ranks,
    registered,
)
from torchtune_adaptive.planner.programs.flex import FlexAttention
from torchtune_adaptive.planner.programs.forks import Fork, IsFork, Questions, forked
from torchtune_adaptive.planner.programs.generation import TextGeneration
from torchtune_adaptive.planner.programs.imports import WhenImported, put
from torchtune_adaptive.planner.programs.known import ProgramWatch
from torchtune_adaptive.planner.programs.loader import LongestBatches
from torchtune_adaptive.planner.programs.models import Models
from torchtune_adaptive.planner.programs.private import let_backward_run_in
from torchtune_adaptive.planner.programs.request import About, Program
from torchtune_adaptive.planner.programs.steps import WANTED, ProgramSteps
from torchtune_adaptive.planner.programs.surroundings import Surroundings
from torchtune_adaptive.planner.programs.unknown import Assumed
from torchtune_adaptive.planner.programs.vllm import Vllm
from torchtune_adaptive.planner.trace.alike_layers import Shortening
from torchtune_adaptive.planner.trace.step_tracer import StepTracer


class Ran(NamedTuple):
    """What a run to the last step has shown."""

    start_up: StartUp
    step: RecordedStep
    shortening: Shortening
    enough: int
    """How many steps of another run tell as much."""
    about: About
    read: frozenset[str]
    """The files that it has read, or looked for."""


class ProgramFailed(NoPrediction):
    """An error of the program, which it might not have with all layers of its models."""


class _Done(BaseException):
    """The program has been answered for; no handler of its own errors is to see that."""


class ProgramRun:
    """One program in this process, of which forks run on with other rows and fewer layers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._assumed = Assumed(program.assumed)
        self._tracer = StepTracer(
            False,
            0,
            1,
            before_ampere=program.gpu.before_ampere,
            watch=lambda recorder, mode: ProgramWatch(recorder, mode, self._assumed),
        )
        self._surroundings = Surroundings()
        self._steps = ProgramSteps(self._tracer, self._train, self._finish)
        self._models = Models(self._tracer, self._begin)
        length = None if program.made_up else program.length
        self._loader = LongestBatches(self._steps, program.rows, length, program.made_up)
        recorder = self._tracer.recorder
        self._generation = TextGeneration(self._steps, recorder)
        self._vllm = Vllm(program.gpu, self._steps, recorder, self._models.config)
        self._compiles = False
        self._flex = FlexAttention(self._tracer.watch.paused)
        self._forks: dict[tuple[int, int, int], Fork] = {}
        """Forks by what shortens their models."""
        self._asked: Questions | None = None
        """What this process is asked for, if it is a fork."""
        self._shortening: Shortening | None = None
        self._answer: Callable[[ProgramRun], Any] | None = None
        self._found: Any = None
        self._read: frozenset[str] = frozenset()

    def read(self) -> frozenset[str]:
        """The files that the program and its forks have read, or looked for."""
        return self._read

    def answered(self, answer: Callable[[ProgramRun], Any]) -> Any:
        """Run the program, and answer where it makes its first model, by ``start``.

        Raises:
            NoPrediction: it makes none, or fails before.
        """
        self._answer = answer
        os.dup2(2 if self.program.shows else os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        gc.disable()  # collections while modules are imported find nothing
        torch.set_num_threads(1)  # others would not be there in forks
        multiprocessing.set_start_method("fork", force=True)  # as programs have it by default
        try:
            self._run()
        except _Done:
            return self._found
        finally:
            if self._asked is None:
                for fork in self._forks.values():
                    fork.end()
                self._surroundings.close()
        raise NoPrediction(
            f"{self.program.name}: ended before it put a model on the GPU. Give a program that "
            "trains, with the arguments that it needs."
        )

    def ranks(self) -> int:
        """The number of ranks.

        Raises:
            NoPrediction: the program is launched on another number than is asked for.
        """
        launched, asked = ranks.number(), self.program.ranks
        if asked not in (None, launched):
            raise NoPrediction(
                f"--nproc: {asked}, but {self.program.name} is launched on {launched} GPUs. Leave one of the "
                "two out."
            )
        return launched

    def start(
        self, rows: int | None, shortening: Shortening, steps: int = WANTED
    ) -> Callable[[], Ran]:
        """Begin a run of so many steps in a fork; what is returned waits for its result.

        Raises:
            NoPrediction: it ended without one.
        """
        return self._ask(shortening, (rows, steps))

    def alike(self) -> Callable[[], bool]:
        """Begin to find whether, when the whole models begin to train, their layers are still alike; what is
        returned waits for that. A program may freeze some of them, for example."""
        return self._ask(Shortening(sys.maxsize), _ALIKE)

    def _ask(self, shortening: Shortening, what: Any) -> Callable[[], Any]:
        """Ask the fork whose models are shortened so."""
        key = shortening.kept, shortening.period, shortening.least
        if key not in self._forks:
            made = forked(self._forks.values())
            if isinstance(made, Questions):
                self._asked, self._shortening = made, shortening
                self._surroundings.forked()
                raise IsFork
            self._forks[key] = made
        answer = self._forks[key].ask(what)

        def result() -> Any:
            found = answer()
            if isinstance(found, Ran):
                self._read |= found.read
            if isinstance(found, Exception):
                raise found
            if isinstance(found, str):
                raise NoPrediction(
                    f"{self.program.name}: the process that ran it ended with {found}."
                )
            return found

        return result

    def _begin(self) -> Shortening:
        """The program makes its first model: answer, and go on in forks."""
        assert self._answer is not None
        gc.freeze()  # nor do later ones, in what was imported
        gc.enable()
        try:
            self._found = self._answer(self)
        except IsFork:
            pass
        else:
            raise _Done
        assert self._shortening is not None
        return self._shortening

    def _train(self) -> None:
        """The program begins to train: go on in forks, with other rows."""
        if self._asked is not None:
            self._asked.serve(self._go_on)

    def _go_on(self, what: Any) -> None:
        assert self._shortening is not None
        if what == _ALIKE:
            self._leave(self._models.alike(self._shortening))
        self._loader.rows, self._steps.wanted = what
        self._surroundings.forked()

    def _run(self) -> None:
        """Run the program to its end; a fork leaves before."""
        imports = WhenImported()
        recorder = self._tracer.recorder
        face = device.Face(self._tracer.watch, self._assumed)  # type: ignore[arg-type]
        self._surroundings.follow(imports)
        commands.follow(imports)
        hub.follow(imports)
        self._shown = device.show(self.program.gpu, self.program.ranks or 1, recorder)
        ranks.follow(self.program.ranks or 1, recorder)
        autocast.allow()
        kernels.follow(imports, self.program.gpu)
        quantized.follow(imports, self._assumed)
        self._models.follow(imports)
        self._steps.follow()
        self._loader.follow(imports)
        if self.program.made_up:
            made_up.MadeUpRows(self.program.length).follow(imports)
        self._generation.follow(imports)
        self._vllm.follow(imports)
        self._flex.follow(imports)
        registered.follow(face)
        imports.call("transformers.masking_utils", lambda it: put(it, "is_tracing", _no))
        let_backward_run_in(face)
        replacements = [
            (owner, name, autocast.in_lower_type(value) if name == _ATTENTION else value)
            for owner, name, value in self._tracer.replacements()
            if (owner, name) != (torch, "tensor")
        ]
        try:
            with replaced(replacements), self._tracer.watch, face:
                put(torch, "compile", self._compiled)
                put(torch, "inference_mode", _without_gradients)
                commands.execute(self.program.words)
        except _Done:
            raise
        except BaseException as error:
            self._failed(error)
        if self._asked is not None:
            self._finish(ended=True)

    def _compiled(self, function: Any = None, **_: Any) -> Any:
        """What is compiled, as it is written; noted when it runs in a step."""
        if function is None:  # a decorator with options
            return self._compiled
        if (alone := self._flex.compiled(function)) is not None:
            return alone
        if isinstance(function, torch.nn.Module):
            self._compiles = self._flex.within = True
            return function

        @functools.wraps(function)
        def as_written(*arguments: Any, **options: Any) -> Any:
            self._flex.within = True
            self._compiles = self._compiles or self._steps.begun
            return function(*arguments, **options)

        return as_written

    def _failed(self, error: BaseException) -> None:
        """End a fork with the error, or raise it as the reason why there is no answer."""
        if isinstance(error, SystemExit) and not error.code:
            return
        reason = (
            error
            if isinstance(error, NoPrediction)
            else ProgramFailed(_said(self.program.name, error))
        )
        if self._asked is None:
            raise reason from None
        self._leave(reason)

    def _finish(self, ended: bool = False) -> None:
        """Send what has been recorded, and end."""
        if not self._steps.complete:
            self._leave(
                NoPrediction(
                    f"{self.program.name}: ended after {self._steps.taken} steps of its optimizer, "
                    f"and {self._steps.wanted} are needed. Give it more rows, or fewer in a step."
                )
            )
        try:
            start_up, step = self._steps.recorded
        except NotRegular as reason:
            if self._steps.may_go_on and not ended:
                return
            self._leave(NoPrediction(f"{self.program.name}: {reason}, so its steps do not repeat."))
        assert self._shortening is not None
        about = About(
            self._loader.seen,
            self._compiles,
            kernels.uncounted(),
            self._models.quantized,
            self._generation.tokens,
            self.program.gpu.name if self._shown.are_counted else self._vllm.card,
            tuple(self._assumed.choices.items()),
            notes.noted(),
            self._models.holders,
        )
        ran = start_up, step, self._shortening, self._steps.enough, about
        self._leave(Ran(*ran, self._surroundings.read()))

    def _leave(self, found: Ran | bool | Exception) -> NoReturn:
        assert self._asked is not None
        self._asked.leave(found)


_ALIKE = "alike"
_ATTENTION = "scaled_dot_product_attention"


def _no(*_: Any) -> bool:
    return False


def _without_gradients(mode: Any = True) -> Any:
    """``torch.inference_mode``, whose tensors cannot be fake; they take as much memory so."""
    if callable(mode):  # a decorator
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else torch.enable_grad()


def _said(name: str, error: BaseException) -> str:
    """What a program's error says, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = f"{os.sep}planner{os.sep}", "<frozen "
    others = [frame for frame in frames if not any(name in frame.filename for name in ours)]
    own = [frame for frame in others if "site-packages" not in frame.filename]
    at = next(reversed(own or others or frames), None)
    where = f" ({os.path.basename(at.filename)}:{at.lineno})" if at else ""
    traceback.print_exception(error, file=sys.__stderr__)
    kind = type(error).__name__
    reason = " ".join(f"{kind}: {error}".split())[:300]
    return f"{name}: it failed on the fake device{where}: {reason}"
