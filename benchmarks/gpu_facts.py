"""What a piece has found, said as soon as it is known, in lines that ``gpu.py`` reads. No torch in here."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping

ASKED = "BENCHMARK_FACTS"
"""The environment variable with which ``gpu.py`` asks for facts; without it, a piece prints the rest only."""
_MARK = "FACT "
_LINE = re.compile(rf"^{_MARK}\[.*\]\n?$")
_OF_PYTEST = re.compile(r"^(\S*::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)


def tell(what: str, result: str) -> None:
    """Say something that belongs in the table of ``gpu.py``."""
    if os.environ.get(ASKED):
        sys.stdout.write(
            f"{_MARK}{json.dumps([what, result])}\n"
        )  # at once: other processes print as well
        sys.stdout.flush()


def told(output: str) -> dict[str, str]:
    """What a piece has told, also one that was stopped, and how each of its tests has ended."""
    facts: dict[str, str] = {}
    for text in output.split(_MARK)[1:]:
        try:  # what another process has printed may come before it, after it, or in its middle
            (what, result), _ = json.JSONDecoder().raw_decode(text)
        except ValueError:
            continue
        facts[what] = result
    return facts | {test: end.lower() for test, end in _OF_PYTEST.findall(output)}


def is_fact(line: str) -> bool:
    """Whether a line of output is for the table only."""
    return _LINE.match(line) is not None


def shown(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts as the table has them: of tests, how many have ended in which way, and which have failed."""
    tests = {what: end for what, end in facts.items() if "::" in what}
    rows = {what: result for what, result in facts.items() if what not in tests}
    if tests:
        number = Counter(tests.values())
        rows["tests"] = ", ".join(f"{number[end]} {end}" for end in sorted(number))
        failed = {test: end for test, end in tests.items() if end in ("failed", "error")}
        rows |= {test.rpartition("::")[2]: end for test, end in failed.items()}
    return rows
