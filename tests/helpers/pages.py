"""Pages of plans, as they are used."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import opened
from tests.helpers.planning import asked
from torchtune_adaptive.cli.plan_options import plan_command

USED = """
const noted = [];
const the = (id) => document.getElementById(id);
const note = () => noted.push({
  verdict: the("verdict").dataset.verdict,
  command: the("command").textContent,
  summary: [...document.querySelectorAll("#summary data")].map((one) => Number(one.value)),
  parts: Object.fromEntries([...document.querySelectorAll("#parts tr")].map(
    (row) => [row.cells[0].textContent, Number(row.querySelector("data").value)])),
  largest: Number(document.querySelector("#largest data")?.value ?? 0),
  speed: the("speed").hidden ? null :
    [...document.querySelectorAll("#speed data")].map((one) => Number(one.value)),
  notice: the("notice").textContent,
  address: location.hash,
});
const slide = (to) => { the("rows").value = to; the("rows").dispatchEvent(new Event("input")); };
const take = (at) => { the("device").value = at; the("device").dispatchEvent(new Event("change")); };
const pick = (name, at) => document.querySelectorAll(`#${name} input`)[at].click();
note();
MOVES
document.body.append(Object.assign(document.createElement("pre"), {
  id: "noted", textContent: JSON.stringify(noted) }));
"""
"""Uses the controls of the page, and notes what it shows."""


def used(page: Path, moves: str) -> list[dict[str, Any]]:
    """What a page shows at first, and after each of some moves."""
    script = USED.replace("MOVES", "\n".join(f"{move}; note();" for move in moves.split("; ")))
    found = re.search(r'<pre id="noted">(.*?)</pre>', opened(page, script))
    assert found is not None
    noted: list[dict[str, Any]] = json.loads(unescape(found[1]))
    return noted


def plan_of(shown: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``plan`` says if it is asked what the page says that it shows."""
    program, plan, *words = shlex.split(shown["command"])
    assert (program, plan) == ("tune-adaptive", "plan")
    plan_command(asked([*words, "--json", "--no-what-ifs"]))
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said
