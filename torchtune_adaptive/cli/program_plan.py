"""Prints the plan of a program: the user's own, that of a trainer's file, or a trainer by settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from torchtune_adaptive.cli.asked_program import AskedProgram
from torchtune_adaptive.cli.job import Job, job
from torchtune_adaptive.cli.margin import caution, caution_of_retries, peak_of
from torchtune_adaptive.cli.page_choices import names_in, require_file
from torchtune_adaptive.cli.plan_progress import with_progress
from torchtune_adaptive.cli.program_page import write_program_page
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
from torchtune_adaptive.planner import Answer, Machine, Peak, gpus, planned_gpu, programs

HEADROOM = 0.05
VLLM = "vLLM"
"""The part of memory that vLLM has."""
_LONGEST = 600.0
"""Seconds that a program may take."""
_NOT_FOR_PROGRAMS = ("fastest", "may-change")


def plan_of_program(
    arguments: argparse.Namespace,
    asked: AskedProgram,
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
    program, kind = asked.program, asked.program.gpu
    if program.rows is not None and program.rows < 1:
        raise ConfigError(asked.rows_key, program.rows, "is not a number of rows", "Use 1 or more")
    names = names_in(arguments.compare)
    others = [gpus.gpu(name, "--compare") for name in names]
    asked_job = job(arguments.tokens, arguments.price, kind.name, names)
    if arguments.html:
        require_file(arguments.html)
    alike = [one for one in others if one.capability == kind.capability]
    is_named = arguments.gpu is not None or memory is None  # or its speed is not known
    devices = programs.OnGpus(kind, machine, HEADROOM, memory, is_named)
    plan = _planned(program, replace(devices, others=tuple(alike)))
    found = dict(zip((one.name for one in alike), plan.answers[1:], strict=True))
    if plan.about.card:
        found = {}
    for one in others:
        if one.name not in found:  # a program may take other branches there
            apart = replace(program, gpu=one)
            other = programs.OnGpus(one, machine.for_other_gpus, HEADROOM)
            found[one.name] = _planned(apart, other).answers[0]
    compared = [DeviceAnswer.of(found[one.name]) for one in others]
    answer = plan.answers[0]
    asked_job = replace(asked_job, unit=_unit(plan))
    _, assumptions = planned_gpu(kind, plan.ranks, HEADROOM, memory)
    about = (*_about(asked, plan), *assumptions, *filter(None, [plan.unchecked]))
    if is_named and answer.speed is None:
        unknown = f"no speed: that of a {kind.name} is not known in the type that is computed in"
        about = (*about, unknown)
    if arguments.json:
        _print_json(answer, plan, about, compared, asked_job)
    else:
        blocks = _blocks(answer, plan, asked, asked_job)
        if compared:
            blocks.append(compare_table(compared, plan.ranks, asked_job))
        print(arguments.render([*blocks, Listing("What is planned", about)]), end="")
    if arguments.html:
        write_program_page(arguments, asked, plan, devices, about)
    return answer.verdict


def _planned(program: programs.Program, devices: programs.OnGpus) -> programs.ProgramPlan:
    found = programs.remembered_plan(program, devices)
    return found or with_progress(lambda: programs.plan_program(program, devices, _LONGEST))


def _unit(plan: programs.ProgramPlan) -> str:
    """What speeds count."""
    seen = plan.about.seen
    if seen is None:
        return "batches"
    return "tokens" if seen.tokens > 1 else "rows"


def _about(asked: AskedProgram, plan: programs.ProgramPlan) -> list[str]:
    """What has been planned, for people."""
    program, found = asked.program, plan.about
    name = program.title or " ".join(program.words)
    lines = [f"program: {name}, run to its third step", *asked.about, *found.notes]
    seen = found.seen
    if seen is None:
        lines.append(
            "batches: as the program makes them, without a DataLoader; no other sizes are planned"
        )
    elif not program.made_up:
        among = counted(seen.looked_at, "row")
        row = f"the longest of the {among} that were looked at"
        if program.length:
            row = f"{program.length} tokens, made of the longest of {among}"
        elif seen.tokens > 1:
            row += f", {counted(seen.tokens, 'token')}"
        together = f", in multiples of {seen.unit}" if seen.unit > 1 else ""
        lines.append(
            f"rows: {row}; a batch has such rows{together}, and one that is shorter where rows differ"
        )
    if seen is not None and seen.read:
        lines.append(
            f"data: {seen.read:,} of the {seen.there:,} rows of the dataset, the longest among them"
        )
    if found.generated:
        longest = counted(found.generated, "token")
        lines.append(
            f"generated: texts of {longest}, the longest that are asked for; all but one end just before"
        )
    if VLLM in plan.answers[0].peak.parts:
        lines.append(
            "vLLM: takes the share of the card that the program says, and 1 GiB as it sleeps (not measured)"
        )
    if found.compiles:
        lines.append("compile: planned as if nothing were compiled, which takes more (upper bound)")
    if found.uncounted:
        names = ", ".join(found.uncounted)
        lines.append(
            f"speed: without the products of {names}, whose time is not known (upper bound)"
        )
    lines += [f"assumed: {place} chooses {how}" for place, how in found.choices]
    lines += [f"assumed: {place} is {value}" for place, value in program.assumed.items()]
    return lines


def _blocks(
    answer: Answer, plan: programs.ProgramPlan, asked: AskedProgram, asked_job: Job
) -> list[Block]:
    peak, device, seen = answer.peak, answer.device, plan.about.seen
    each = f"each of {plan.ranks} x " if plan.ranks > 1 else ""
    size = f"batch of {peak.rows}" if seen else "its batch"
    fits = f" Largest that fits: {answer.largest}." if answer.largest else " Not even one row fits."
    if answer.largest == asked.program.ceiling:
        fits = f" {answer.largest} or more fit."
    largest = fits if seen else ""
    batches = f" x {plan.micro_batches} in a step" if plan.micro_batches > 1 else ""
    if seen and seen.shared > 1:
        batches = f", trained on in {seen.shared} passes"
    lines = [
        f"{size}{batches}: {answer.verdict}, peak {peak_of(device, peak.reserved)}.{largest}",
        f"{asked.program.name} on {each}{device.name}",
        *_of_phases(peak),
    ]
    if peak.with_retries:
        lines.append(caution_of_retries(f"with {peak.rows}"))
    elif answer.verdict == "UNCERTAIN":
        lines.append(caution(device, f"with {peak.rows}"))
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])
    rows = [(name, human_bytes(size)) for name, size in parts if size >= 1 << 20]
    rows.append(("held by the allocator", human_bytes(peak.reserved)))
    header = ("peak memory", f"at {peak.rows}" if seen else "")
    blocks: list[Block] = [Paragraph(lines, important=True), Table("", header, rows, right={1})]
    if answer.speed:
        blocks += speed_blocks(
            answer.speed, peak.rows, plan.ranks, asked_job, answer.fits, "a batch of"
        )
    return blocks


def _of_phases(peak: Peak) -> list[str]:
    """What limits a program that generates."""
    most = dict(peak.by_phase)
    generating = most.pop(programs.GENERATION, None)
    if generating is None:
        return []
    others = human_bytes(max(most.values(), default=0))
    return [f"tensors: {human_bytes(generating)} as it generates, {others} in the rest of the step"]


def _print_json(
    answer: Answer,
    plan: programs.ProgramPlan,
    about: Sequence[str],
    compared: Sequence[DeviceAnswer],
    asked_job: Job,
) -> None:
    seen = plan.about.seen
    found = {
        "verdict": answer.verdict,
        "ranks": plan.ranks,
        "rows": answer.peak.rows,
        "largest": answer.largest,
        "device": asdict(answer.device),
        "peak": asdict(answer.peak),
        "micro_batches": plan.micro_batches,
        "generated_tokens": plan.about.generated,
        "tokens_in_a_row": seen.tokens if seen else None,
        **speed_as_dict(answer.speed, plan.ranks, asked_job, answer.fits),
        "speed": asdict(answer.speed) if answer.speed else None,
        "compared": [asdict(one) for one in compared],
        "assumptions": [*about],
    }
    print(json.dumps(found, indent=1))
