"""The page of a plan: one file of HTML in which rows, their length, GPUs and checkpointing can be changed.

The page has the tables of all its questions, and looks up in them: it computes no memory and no time.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from torchtune_adaptive import __version__
from torchtune_adaptive.cli.margin import peak_of
from torchtune_adaptive.cli.page_questions import Again, PageAnswer, PageTables
from torchtune_adaptive.cli.plan_report import AS_WRITTEN
from torchtune_adaptive.common import ConfigError, NoPrediction, atomically, counted
from torchtune_adaptive.planner import Peak, Speed, gpus
from torchtune_adaptive.recipe import OnDevice, PlanRequest

_FOLDER = Path(__file__).parent
_DIGITS = 7
"""Significant digits of speeds."""
_MACHINE = ("nodes", "power", "links", "network", "machine")
_CHECKPOINTING = {"all": "on", "none": "off", "operations": "some operations"}


def tables_for(plan: PlanRequest, arguments: argparse.Namespace, again: Again) -> PageTables | None:
    """The tables of the page that is asked for; None if none is.

    Raises:
        ConfigError: the page cannot be written, or not together with another option.
        NoPrediction: there are no pages of such plans.
    """
    if arguments.html is None:
        return None
    path: Path = arguments.html
    if plan.asked.kind.generates:
        raise NoPrediction(
            "--html is not for recipes that generate the rows that they train on: a page shows steps alone. "
            "Leave it out."
        )
    if arguments.fastest or arguments.may_change is not None:
        reason = "shows one configuration, and --fastest is about many"
        raise ConfigError("--html", str(path), reason, "Leave one of the two out")
    if path.is_dir() or not path.parent.is_dir():
        reason = (
            "is a folder"
            if path.is_dir()
            else f"is in a folder that does not exist ({path.parent})"
        )
        raise ConfigError("--html", str(path), reason, "Name a file")
    if arguments.compare:
        return PageTables(plan, again, tuple(arguments.compare.split(",")))
    return PageTables(plan, again)


def write_page(plan: PlanRequest, arguments: argparse.Namespace, tables: PageTables) -> bool:
    """Write the page with what is known, whole or not at all; returns whether there was anything to write.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not (known := tables.known()):
        return False
    facts = _facts(plan, arguments, tables, known)
    page = page_of(plan.name, facts, _answer(known[0], facts["asked"]))
    try:
        with atomically(arguments.html, flush=False) as temporary:
            temporary.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError("--html", str(arguments.html), reason, "Name another file") from None
    return True


def _answer(own: PageAnswer, asked: dict[str, int]) -> str:
    """The answer to the user's question as text, for browsers without scripts."""
    here = own.table.on_devices[asked["device"]]
    at = own.table.rows.index(asked["rows"])
    tables = [own.table, *([own.other_rank] if own.other_rank else [])]
    most = max(each.on_devices[asked["device"]].peaks[at].reserved for each in tables)
    verdict = here.device.verdict(most)
    peak = peak_of(here.device, here.peaks[at].reserved)
    return (
        f"batch_size {asked['rows']}, rows of {own.table.length:,} tokens, "
        f"{counted(own.question.plan.ranks, 'GPU')} ({here.device.name}): {verdict}, peak {peak}. "
        f"Largest micro-batch that fits: {here.largest or 'none'}."
    )


def page_of(subject: str, facts: dict[str, Any], answer: str) -> str:
    """The page, as HTML.

    Args:
        subject: the name of what is planned.
        facts: what the script of the page reads.
        answer: the answer to the user's question, for browsers without scripts.
    """
    # In a script only "<" could end it.
    embedded = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    read = {
        kind: (_FOLDER / f"plan_page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    }
    return Template(read["html"]).substitute(
        subject=escape(subject),
        style=read["css"],
        script=read["js"],
        facts=embedded,
        answer=escape(answer),
    )


def _facts(
    plan: PlanRequest,
    arguments: argparse.Namespace,
    tables: PageTables,
    known: Sequence[PageAnswer],
) -> dict[str, Any]:
    """What the page knows, for its script."""
    own = known[0].table
    notes = [AS_WRITTEN.format(own.as_written)] if own.as_written else []
    return {
        "version": __version__,
        "command": _command(plan, arguments),
        "accumulation": plan.asked.accumulation,
        "holders": plan.asked.holders,
        "rows": own.rows,
        "devices": [_device(name, arguments) for name in tables.devices],
        "choices": [_choice(one) for one in known],
        "asked": {
            "rows": plan.query().rows,
            "device": tables.devices.index(plan.device.name),
            "choice": 0,
        },
        "length_source": plan.length_source,
        "assumptions": [*notes, *plan.assumptions],
        "missing": tables.missing,
    }


def _command(plan: PlanRequest, arguments: argparse.Namespace) -> str:
    """What to type for the same model: the page adds what is chosen there."""
    changes = [word for word in arguments.words if "=" in word or word.startswith("~")]
    changes = [word for word in changes if not word.startswith("batch_size=")]
    words = ["tune-adaptive", "plan"]
    if arguments.hf:
        words += ["--hf", arguments.hf.name if arguments.hf.source else str(arguments.hf.folder)]
        words += ["--method", arguments.method] if arguments.method else []
    else:
        words.append(plan.name)
    for option in _MACHINE:
        if (value := getattr(arguments, option)) is not None:
            words += [f"--{option}", str(value)]
    return shlex.join([*words, *changes])


def _device(name: str, arguments: argparse.Namespace) -> dict[str, str]:
    """The name of a GPU, and what to type for it."""
    options = ["--gpu", name]
    if name not in gpus.GPUS:  # an amount of memory, or what was measured
        given = {"--memory": arguments.memory, "--gpu": arguments.gpu}
        options = [word for pair in given.items() if pair[1] for word in pair]
    return {"name": name, "words": shlex.join(options)}


def _choice(one: PageAnswer) -> dict[str, Any]:
    question, on_devices = one.question, one.table.on_devices
    others = one.other_rank.on_devices if one.other_rank else (None,) * len(on_devices)
    replays: list[Sequence[Peak]] = []
    found = []
    for here, other in zip(on_devices, others, strict=True):
        if here.peaks not in replays:
            replays.append(here.peaks)
        found.append({**_on_device(here, other), "peaks": replays.index(here.peaks)})
    shown = question.checkpointing
    return {
        "length": question.plan.length,
        "ranks": question.plan.ranks,
        "checkpointing": _CHECKPOINTING.get(shown, shown.replace("_", " ")),
        "overrides": question.overrides,
        "peaks": [_peaks(peaks) for peaks in replays],
        "devices": found,
    }


def _peaks(peaks: Sequence[Peak]) -> dict[str, Any]:
    names = sorted({name for peak in peaks for name in peak.parts})
    return {
        "reserved": [peak.reserved for peak in peaks],
        "parts": {name: [peak.parts.get(name, 0) for peak in peaks] for name in names},
        "phases": [peak.phase for peak in peaks],
    }


def _on_device(here: OnDevice, other: OnDevice | None) -> dict[str, Any]:
    device = here.device
    return {
        "usable": device.usable_bytes,
        "surely": device.surely_usable_bytes,
        "band": [device.band, device.band_above],
        "largest": here.largest,
        "other": [peak.reserved for peak in other.peaks] if other else None,
        "speeds": [_speed(speed) for speed in here.speeds],
    }


def _speed(speed: Speed | None) -> dict[str, Any] | None:
    if speed is None:
        return None
    exact = {
        "tokens": speed.tokens_per_second_per_gpu,
        "mfu": speed.mfu,
        "seconds": speed.seconds,
    }
    shown = {name: float(f"{value:.{_DIGITS}g}") for name, value in exact.items()}
    return {**shown, "band": speed.band}
