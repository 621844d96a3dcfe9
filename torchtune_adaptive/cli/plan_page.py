"""The page of a plan: one file of HTML in which rows, their length, GPUs and checkpointing can be changed.

The page has the tables of all its choices, and looks up in them: it computes no memory and no time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from torchtune_adaptive import __version__
from torchtune_adaptive.cli.margin import AS_WRITTEN, peak_of, worst
from torchtune_adaptive.cli.page_choices import Page, PageChoice
from torchtune_adaptive.common import ConfigError, atomically, counted
from torchtune_adaptive.planner import Peak, Speed, step_table

_FOLDER = Path(__file__).parent
_DIGITS = 7
"""Significant digits of speeds."""


def write_page(path: Path, page: Page | None) -> None:
    """Write a page, whole or not at all, and say so; None if there is no answer to show.

    Raises:
        ConfigError: the file cannot be written.
    """
    if page is None:
        print("Page: not written, as its first answer was not finished", file=sys.stderr)
        return
    text = page_of(page.subject, _facts(page), _answer(page))
    try:
        with atomically(path, flush=False) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError("--html", str(path), reason, "Name another file") from None
    print(f"Page: {path}", file=sys.stderr)


def page_of(subject: str, facts: dict[str, Any], answer: str) -> str:
    """The page, as HTML.

    Args:
        subject: the name of what is planned.
        facts: what the script of the page reads.
        answer: the answer to the user's question, for browsers without scripts.
    """
    # In a script only "<" could end it.
    embedded = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    parts = {kind: (_FOLDER / f"plan_page.{kind}").read_text("utf-8") for kind in ("css", "js")}
    return Template((_FOLDER / "plan_page.html").read_text("utf-8")).substitute(
        subject=escape(subject),
        style=parts["css"],
        script=parts["js"],
        facts=embedded,
        answer=escape(answer),
    )


def _answer(page: Page) -> str:
    """The answer to the user's question as text."""
    own = page.choices[0]
    here, at = own.table.on_devices[page.device], own.table.rows.index(page.rows)
    return (
        f"{page.rows_key} {page.rows}, rows of {own.length:,} tokens, {counted(own.ranks, 'GPU')} "
        f"({here.device.name}): {_verdicts(own, page.device)[at]}, "
        f"peak {peak_of(here.device, here.peaks[at].reserved)}. "
        f"Largest micro-batch that fits: {here.largest or 'none'}."
    )


def _facts(page: Page) -> dict[str, Any]:
    """What the page knows, for its script."""
    own = page.choices[0].table
    notes = [AS_WRITTEN.format(own.as_written)] if own.as_written else []
    return {
        "version": __version__,
        "command": page.command,
        "rows_key": page.rows_key,
        "accumulation": page.accumulation,
        "rows": own.rows,
        "devices": [{"name": name, "words": words} for name, words in page.devices],
        "choices": [_choice(one) for one in page.choices],
        "asked": {"rows": page.rows, "device": page.device, "choice": 0},
        "assumptions": [*notes, *page.assumptions],
        "missing": page.missing,
    }


def _choice(one: PageChoice) -> dict[str, Any]:
    replays: list[dict[str, Any]] = []
    found = []
    for number, here in enumerate(one.table.on_devices):
        if (peaks := _peaks(here.peaks)) not in replays:
            replays.append(peaks)
        about = {"peaks": replays.index(peaks), "verdicts": _verdicts(one, number)}
        found.append({**_on_device(here), **about})
    return {
        "length": one.length,
        "ranks": one.ranks,
        "checkpointing": one.checkpointing,
        "overrides": one.overrides,
        "peaks": replays,
        "devices": found,
    }


def _peaks(peaks: Sequence[Peak]) -> dict[str, Any]:
    names = sorted({name for peak in peaks for name in peak.parts})
    return {
        "reserved": [peak.reserved for peak in peaks],
        "parts": {name: [peak.parts.get(name, 0) for peak in peaks] for name in names},
        "phases": [peak.phase for peak in peaks],
    }


def _verdicts(one: PageChoice, device: int) -> list[str]:
    """The verdict on each size, on the rank where it is worse."""
    tables = [one.table, *([one.other_rank] if one.other_rank else [])]
    on_ranks = [table.on_devices[device] for table in tables]
    verdicts = ([peak.verdict(rank.device) for peak in rank.peaks] for rank in on_ranks)
    return [worst(each) for each in zip(*verdicts, strict=True)]


def _on_device(here: step_table.OnDevice) -> dict[str, Any]:
    device = here.device
    return {
        "usable": device.usable_bytes,
        "band": [device.band, device.band_above],
        "largest": here.largest,
        "retries": [peak.with_retries for peak in here.peaks],
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
