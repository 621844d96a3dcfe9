"""What a piece has found, said as soon as it is known, in lines that ``gpu.py`` reads. No torch in here."""

from __future__ import annotations

import json
import os
import re
from collections import Counter

ASKED = "BENCHMARK_FACTS"
"""The environment variable with which ``gpu.py`` asks for facts; without it, a piece prints the rest only."""
_MARK = "FACT "
_OF_PYTEST = re.compile(r"^(\S*::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)


def tell(what: str, result: str) -> None:
    """Say something that belongs in the table of ``gpu.py``."""
    if os.environ.get(ASKED):
        print(_MARK + json.dumps([what, result]), flush=True)


def told(output: str) -> dict[str, str]:
    """What a piece has told, also one that was stopped; of tests, how many have passed and which have not."""
    facts: dict[str, str] = {}
    for line in output.splitlines():
        if line.startswith(_MARK):
            what, result = json.loads(line.removeprefix(_MARK))
            facts[what] = result
    ends = dict(_OF_PYTEST.findall(output))
    if ends:
        number = Counter(ends.values())
        facts["tests"] = ", ".join(f"{number[end]} {end.lower()}" for end in sorted(number))
        for test, end in ends.items():
            if end in ("FAILED", "ERROR"):
                facts[test.rpartition("::")[2]] = end.lower()
    return facts


def without_facts(output: str) -> str:
    """The output as it is shown."""
    lines = output.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_MARK))
