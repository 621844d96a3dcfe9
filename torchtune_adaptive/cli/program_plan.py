"""``plan train.py ...``: the user's own program, run on a GPU that is not there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from torchtune_adaptive.cli.job import Job, job
from torchtune_adaptive.cli.margin import caution, caution_of_retries, peak_of
from torchtune_adaptive.cli.page_choices import names_in
from torchtune_adaptive.cli.plan_progress import with_progress
from torchtune_adaptive.cli.speed_report import (
    DeviceAnswer,
    compare_table,
    speed_as_dict,
    speed_blocks,
)
from torchtune_adaptive.common import (
    Block,
    ConfigError,
    Listing,
    Paragraph,
    Table,
    counted,
    human_bytes,
)
from torchtune_adaptive.planner import (
    Answer,
    DeviceLimits,
    Machine,
    Pace,
    gpus,
    planned_gpu,
    programs,
)

_HEADROOM = 0.05
_LONGEST = 600.0
"""Seconds that a program may take."""
_WITH_VALUE = (
    *("--gpu", "--nproc", "--nodes", "--memory", "--rows", "--max-length", "--assume", "--compare"),
    *("--tokens", "--price", "--power", "--links", "--network"),
)
_ALONE = ("--json", "--markdown", "--no-what-ifs", "--show-output")
"""Options of ``plan`` that may stand among those of the program."""
_NOT_FOR_PROGRAMS = ("html", "fastest", "may-change", "hf", "trainer", "method", "accelerate")


class CommandLine(NamedTuple):
    """A command line: what is for ``plan``, and what is the program with its arguments."""

    words: list[str]
    program: tuple[str, ...]


def split(words: Sequence[str]) -> CommandLine:
    """Find the program on a command line: a script, ``-m`` and a module, or a command. All that follows is
    the program's own, but for options of ``plan``; what follows ``--`` is so in any case."""
    words = [*words]
    explicit = "--" in words
    begin = words.index("--") + 1 if explicit else _begin(words)
    if begin is None or begin >= len(words):
        return CommandLine(words, ())
    own, program = words[: begin - explicit], words[begin:]
    if explicit:
        return CommandLine(own, tuple(program))
    head = 2 if program[0] == "-m" else 1
    kept, rest = program[:head], iter(program[head:])
    for word in rest:
        name = word.partition("=")[0]
        if name in _WITH_VALUE:
            own += [word] if "=" in word else [word, next(rest, "")]
        elif name in _ALONE:
            own.append(word)
        else:
            kept.append(word)
    return CommandLine(own, tuple(kept))


def _begin(words: Sequence[str]) -> int | None:
    """Where the program begins, if there is one."""
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if word == "-m":
            return at
        if word.startswith("-") or before in _WITH_VALUE:
            continue
        is_option = before.startswith("-") and before not in _ALONE
        if word.endswith(".py"):
            return None if _is_recipe(word, words) else at
        if not is_option and programs.command(word):
            return at
    return None


def _is_recipe(path: str, words: Sequence[str]) -> bool:
    """Whether a script is a recipe of torchtune's, which may stand before its config."""
    if not any(word.partition("=")[0] == "--config" for word in words):
        return False
    return not Path(path).is_file() or "config.parse" in Path(path).read_text(errors="replace")


def plan_of_program(
    arguments: argparse.Namespace,
    ranks: int | None,
    gpu: str | None,
    memory: int | None,
    machine: Machine,
) -> str:
    """Print a prediction of what a program trains; returns its verdict.

    Raises:
        ConfigError: an option cannot work.
        NoPrediction: the program cannot be run on a device that is not there.
    """
    for name in _NOT_FOR_PROGRAMS:
        if value := getattr(arguments, name.replace("-", "_")):
            raise ConfigError(f"--{name}", str(value), "is not for a program", "Leave it out")
    if arguments.rows is not None and arguments.rows < 1:
        raise ConfigError("--rows", arguments.rows, "is not a number of rows", "Use 1 or more")
    if arguments.words:
        remedy = "Write what is for the program after its name"
        raise ConfigError("plan", arguments.words[0], "stands before a program", remedy)
    words = arguments.program
    if words[0] != "-m" and not Path(words[0]).is_file() and not programs.command(words[0]):
        remedy = "Give the path of a script, or the command of an installed package"
        raise ConfigError("PROGRAM", words[0], "is not a file", remedy)
    kind = gpus.gpu(gpu or gpus.DEFAULT)
    names = names_in(arguments.compare)
    others = [gpus.gpu(name, "--compare") for name in names]
    asked_job = job(arguments.tokens, arguments.price, kind.name, names)
    program = programs.Program(
        words=words,
        gpu=kind,
        ranks=ranks,
        rows=arguments.rows,
        length=arguments.seq_len,
        assumed=_assumed(arguments.assume or ()),
        shows=arguments.show_output,
    )
    alike = [one for one in others if one.capability == kind.capability]
    is_named = gpu is not None or memory is None
    plan = _planned(program, _Devices(kind, tuple(alike), machine, memory, is_named))
    found = dict(zip((one.name for one in alike), plan.answers[1:], strict=True))
    for one in others:
        if one.name not in found:  # a program may take other branches there
            apart = replace(program, gpu=one, rows=plan.answers[0].peak.rows if plan.seen else None)
            found[one.name] = _planned(apart, _Devices(one, (), machine.for_other_gpus)).answers[0]
    compared = [DeviceAnswer.of(found[one.name]) for one in others]
    answer = plan.answers[0]
    asked_job = replace(asked_job, unit=_unit(plan))
    _, assumptions = planned_gpu(kind, plan.ranks, _HEADROOM, memory)
    about = (*_about(program, plan), *assumptions)
    if arguments.json:
        _print_json(answer, plan, about, compared, asked_job)
        return answer.verdict
    blocks = _blocks(answer, plan, program, asked_job)
    if compared:
        blocks.append(compare_table(compared, plan.ranks, asked_job))
    print(arguments.render([*blocks, Listing("What is planned", about)]), end="")
    return answer.verdict


@dataclass(frozen=True)
class _Devices:
    """The devices to plan on, whatever the number of ranks."""

    planned: gpus.Gpu
    others: tuple[gpus.Gpu, ...]
    machine: Machine
    memory: int | None = None
    """The capacity of the planned one, if told."""
    paced: bool = True
    """Whether it is a GPU that is named, so that its speed may be known."""

    def __call__(self, ranks: int) -> list[tuple[DeviceLimits, Pace | None]]:
        first, _ = planned_gpu(self.planned, ranks, _HEADROOM, self.memory)
        found = [(first, _pace(self.planned, ranks, self.machine) if self.paced else None)]
        for kind in self.others:
            device, _ = planned_gpu(kind, ranks, _HEADROOM)
            found.append((device, _pace(kind, ranks, self.machine.for_other_gpus)))
        return found


def _planned(program: programs.Program, devices: _Devices) -> programs.ProgramPlan:
    return with_progress(lambda: programs.plan_program(program, devices, _LONGEST))


def _unit(plan: programs.ProgramPlan) -> str:
    """What speeds count."""
    if plan.seen is None:
        return "batches"
    return "tokens" if plan.seen.tokens > 1 else "rows"


def _pace(kind: gpus.Gpu, ranks: int, machine: Machine) -> Pace | None:
    """What the speed on a GPU follows from, if that is known."""
    speeds = machine.speeds(kind.name)
    return Pace(speeds, ranks, compiled=False, quantized=False, dtype="") if speeds else None


def _assumed(given: Sequence[str]) -> dict[str, Any]:
    """The values that ``--assume train.py:31=0.5`` gives, by the place."""
    values = {}
    for one in given:
        place, equals, value = one.partition("=")
        if not equals or not place.rpartition(":")[2].isdigit():
            remedy = "Write it as the error says, for example train.py:31=0.5"
            raise ConfigError("--assume", one, "is not a place and a value", remedy)
        values[place] = yaml.safe_load(value)
    return values


def _about(program: programs.Program, plan: programs.ProgramPlan) -> list[str]:
    """What has been planned, for people."""
    seen, lines = plan.seen, [f"program: {' '.join(program.words)}, run to its third step"]
    if seen is None:
        lines.append(
            "batches: as the program makes them, without a DataLoader; no other sizes are planned"
        )
    else:
        among = counted(seen.looked_at, "row")
        row = f"the longest of the {among} that were looked at"
        if program.length:
            row = f"{program.length} tokens, made of the longest of {among}"
        elif seen.tokens > 1:
            row += f", {counted(seen.tokens, 'token')}"
        lines.append(
            f"rows: {row}; a batch has such rows, and one that is shorter where rows differ"
        )
        if seen.read:
            lines.append(
                f"data: {seen.read:,} of the {seen.there:,} rows of the dataset, the longest among them"
            )
    if plan.compiles:
        lines.append("compile: planned as if nothing were compiled, which takes more (upper bound)")
    if plan.uncounted:
        names = ", ".join(sorted(plan.uncounted))
        lines.append(
            f"speed: without the products of {names}, whose time is not known (upper bound)"
        )
    lines += [f"assumed: {place} chooses {how}" for place, how in plan.choices.items()]
    lines += [f"assumed: {place} is {value}" for place, value in program.assumed.items()]
    return lines


def _blocks(
    answer: Answer, plan: programs.ProgramPlan, program: programs.Program, asked_job: Job
) -> list[Block]:
    peak, device = answer.peak, answer.device
    each = f"each of {plan.ranks} x " if plan.ranks > 1 else ""
    size = f"batch of {peak.rows}" if plan.seen else "its batch"
    fits = f" Largest that fits: {answer.largest}." if answer.largest else " Not even one row fits."
    largest = fits if plan.seen else ""
    batches = f" x {plan.micro_batches} in a step" if plan.micro_batches > 1 else ""
    lines = [
        f"{size}{batches}: {answer.verdict}, peak {peak_of(device, peak.reserved)}.{largest}",
        f"{program.name} on {each}{device.name}",
    ]
    if peak.with_retries:
        lines.append(caution_of_retries(f"with {peak.rows}"))
    elif answer.verdict == "UNCERTAIN":
        lines.append(caution(device, f"with {peak.rows}"))
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])
    rows = [(name, human_bytes(size)) for name, size in parts if size >= 1 << 20]
    rows.append(("held by the allocator", human_bytes(peak.reserved)))
    header = ("peak memory", f"at {peak.rows}" if plan.seen else "")
    blocks: list[Block] = [Paragraph(lines, important=True), Table("", header, rows, right={1})]
    if answer.speed:
        blocks += speed_blocks(
            answer.speed, peak.rows, plan.ranks, asked_job, answer.fits, "a batch of"
        )
    return blocks


def _print_json(
    answer: Answer,
    plan: programs.ProgramPlan,
    about: Sequence[str],
    compared: Sequence[DeviceAnswer],
    asked_job: Job,
) -> None:
    found = {
        "verdict": answer.verdict,
        "ranks": plan.ranks,
        "rows": answer.peak.rows,
        "largest": answer.largest,
        "device": asdict(answer.device),
        "peak": asdict(answer.peak),
        "micro_batches": plan.micro_batches,
        "tokens_in_a_row": plan.seen.tokens if plan.seen else None,
        **speed_as_dict(answer.speed, plan.ranks, asked_job, answer.fits),
        "speed": asdict(answer.speed) if answer.speed else None,
        "compared": [asdict(one) for one in compared],
        "assumptions": [*about],
    }
    print(json.dumps(found, indent=1))
