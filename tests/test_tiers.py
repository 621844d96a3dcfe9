"""Which tests and cases each tier runs, and that successive runs of CI run them all."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import accumulate, count, islice
from pathlib import Path

import pytest

from tests.helpers.beside import ROOT
from tests.helpers.samples import Sample
from tests.helpers.tiers import PLACES, SWEEP, Case, between, place, quick, rest
from tests.helpers.what_ran import LANES

# Writes all cases of all tests to a file, as the tiers see them.
CASES = """
import json, sys, pytest
from dataclasses import astuple
from pathlib import Path
from tests.conftest import case_of
from tests.helpers.what_ran import lane_of
class Cases:
    def pytest_collection_modifyitems(self, items):
        found = [(lane_of(item), astuple(case_of(item))) for item in items]
        Path(sys.argv[1]).write_text(json.dumps(found))
pytest.main(["--collect-only", "--quiet", "--exhaustive", "tests"], plugins=[Cases()])
"""

SHARE = 0.05
"""Of the rest, what each lane of a run of CI comes to on an idle machine, at least; it says how much."""
WITHIN, WITHIN_SWEEPS = 300, 4000
"""So many runs of CI find every case, and those of sweeps. CONTRIBUTING.md says so."""


def jumping(seed: int) -> Iterator[int]:
    """Counts of commits when CI runs."""
    chance = random.Random(seed)
    return accumulate(chance.randint(1, 60) for _ in count())


def successions() -> dict[str, Iterable[int]]:
    return {
        "successive": count(1408),
        **{f"every {step}th": count(1408, step) for step in (8, 29, 60)},
        **{f"jumping, seed {seed}": jumping(seed) for seed in range(2)},
    }


def test_runs_of_ci_find_every_case(tmp_path: Path) -> None:
    file = tmp_path / "cases"
    command = [sys.executable, "-c", CASES, file]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
    found = [(lane, Case(*each)) for lane, each in json.loads(file.read_text())]
    cases, lane_of = [case for _, case in found], {case.name: lane for lane, case in found}
    assert len(cases) > 6000 and len({case.name for case in cases}) == len(cases)
    # Those that the quick tier always runs in full need no replay.
    chosen = [c for c in cases if c.exhaustive or c.sampled or c.rotating or c.alternating]
    assert len({place(case.name) for case in chosen}) == len(chosen), "an arc has one beginning"
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert f"{WITHIN} runs find every case" in page and f"{WITHIN_SWEEPS:,} those" in page
    sweeps = [case for case in chosen if case.sweep]
    for name, numbers in successions().items():
        assert not left_by(islice(numbers, WITHIN), chosen, lane_of), name
    assert not left_by(islice(jumping(0), WITHIN_SWEEPS), sweeps, lane_of, sweeps=True)


def left_by(
    numbers: Iterable[int], cases: list[Case], lane_of: dict[str, str], sweeps: bool = False
) -> set[str]:
    """The cases that runs of CI with these numbers do not find, of sweeps or of other tests."""
    left = {case.name for case in cases if case.sweep == sweeps}
    for number in numbers:
        left -= proved(cases, lane_of, number)
        if not left:
            break
    return left


def proved(cases: list[Case], lane_of: dict[str, str], number: int) -> set[str]:
    """What a run of CI proves all of that it can."""
    found = quick(cases, number) - {case.name for case in cases if case.sampled}
    owed = rest(cases, number)
    for lane in LANES:
        of_lane = [name for name in owed if lane_of[name] == lane]
        found |= {*of_lane[: round(SHARE * len(of_lane))]}
    return found


def test_successive_numbers_find_every_operation() -> None:
    """As tests sample them, with hashes of the number and of their names."""
    left = {*range(1, 301)}
    for number in range(200):
        left -= {*Sample(False, place(f"{number} test"), 29).of(300)}
    assert not left


def cases_of(test: str, cases: int, **marks: bool | int) -> list[Case]:
    return [Case(f"tests/test_file.py::{test}[{n}]", **marks) for n in range(cases)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("cases", "at_once"), [(1, 1), (3, 1), (5, 2), (7, 7), (2, 3)])
def test_the_quick_tier_runs_some_cases_of_a_rotating_test(cases: int, at_once: int) -> None:
    every = cases_of("test_name", cases, rotating=at_once)
    found = [quick(every, number) for number in range(60)]
    assert {len(each) for each in found} == {min(cases, at_once)}
    assert set.union(*found) == {case.name for case in every}


def test_the_quick_tier_runs_a_third_of_the_alternating_tests_of_a_file() -> None:
    every = [
        *(case for letter in "abc" for case in cases_of(f"test_{letter}", 2, alternating=True)),
        *cases_of("test_both", 3, alternating=True, rotating=1),
        *cases_of("test_always", 2),
        *cases_of("test_never", 2, exhaustive=True),
    ]
    found = [quick(every, number) for number in range(40)]
    tests = [{name.partition("[")[0] for name in each} for each in found]
    assert all(len(each) == 3 for each in tests), "two of four, and the one that does not alternate"
    assert set.union(*found) == {case.name for case in every if not case.exhaustive}


def test_the_rest_is_what_the_quick_tier_owes() -> None:
    every = [
        *cases_of("test_turning", 9, rotating=2),
        *cases_of("test_in_part", 3, sampled=True),
        *cases_of("test_long", 4, exhaustive=True),
        *cases_of("test_short", 2),
    ]
    for number in range(9):
        ran, owed = quick(every, number), rest(every, number)
        assert len(owed) == 7 + 3 + 4
        assert ran.isdisjoint(name for name in owed if "in_part" not in name)
        assert ran | {*owed} == {case.name for case in every}
        assert owed == rest(every[::-1], number), "names decide, not where they are found"
    assert len({rest(every, number)[0] for number in range(9)}) > 2


def test_the_rest_takes_a_tenth_of_a_sweep() -> None:
    every = cases_of("test_name", 200, exhaustive=True, sweep=True)
    found = [rest(every, number) for number in range(100)]
    assert all(0 < len(each) < 4 * len(every) / SWEEP for each in found)
    assert {name for each in found for name in each} == {case.name for case in every}


def test_two_arcs_are_the_ring() -> None:
    names = [f"test_{number}" for number in range(50)]
    first, end = place(names[0]), place(names[1])
    some = {name for name in names if between(first, end, name)}
    others = {name for name in names if between(end, first, name)}
    assert names[0] in some and names[1] in others
    assert len(some) + len(others) == len(some | others) == len(names)
    assert all(between(first, first, name) for name in names)
    assert all(place(name) in range(PLACES) for name in names)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--places", "1-2", "--rest"], "'1-2' is not of the form 0123abcd-4567cdef. Take it from"),
        (["--places", "00000001-00000002"], "--places: only the rest has an order of its own."),
        (["--minutes", "1"], "--minutes: only the rest has an order of its own. Add --rest"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", __file__, *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR and said in run.stderr


def test_what_a_limit_cuts_off_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pytest, time\n"
        "@pytest.mark.exhaustive\n"
        "@pytest.mark.parametrize('case', range(200))\n"
        "def test_one(case): time.sleep(0.05 * bool(os.environ['SLOW']))\n"
    )

    def ran(*options: str, slow: str = "") -> tuple[set[str], str]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-W", "ignore", "-v"]
        command += ["-p", "no:cacheprovider", "--rest", "--rootdir", f"{tmp_path}", *options]
        environment = {**os.environ, "SLOW": slow}
        command += [f"{tmp_path}"]
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return {*re.findall(r"(test_one\[\d+\]) PASSED", run.stdout)}, run.stdout

    found, said = ran("--shard", "5", "--minutes", f"{3 / 60}", "--lane", "unit", slow="1")
    assert 0 < len(found) < 200
    assert f"{len(found)} of 200 ran." in said
    assert f"{len(found)} passed, {200 - len(found)} deselected" in said
    again, others = re.findall(r"make test-unit TIER=--rest SHARD=5 PLACES=(\S+)", said)
    line = (tmp_path / "build" / "lanes" / "rest_unit").read_text()
    slowest = r"0 s test_some.py::test_one\[\d+\]"
    assert re.fullmatch(
        rf"rest, unit: {len(found)} of 200 tests in \d+ s \({len(found)} passed\); "
        rf"slowest: {slowest}, {slowest}, {slowest}\n",
        line,
    ), line
    assert ran("--shard", "5", "--places", again)[0] == found
    left, said = ran("--shard", "5", "--places", others)
    assert left.isdisjoint(found) and len(left | found) == 200
    assert f"{len(left)} of {len(left)} ran." in said
