"""The tiers of the tests.

The quick tier has every kind of run, and a sample of what each of them proves: memory runs out at every 29th
allocation instead of at each one; settings are compared with torchtune's in combinations, not one by one.
``--exhaustive`` runs all tests. A test that does less without the flag asks for ``exhaustive`` or ``sample``;
one that does not run at all without it is marked ``exhaustive``. Of the cases of a test that is marked
``rotating``, the quick tier runs one, or as many as the mark says. Of the tests of a file that are marked
``alternating``, it runs half.

``--rest`` runs what the quick tier leaves out or samples, in an order of its own, and begins no test after
``--minutes``. Which ones the tiers take is a function of names and of ``--shard``: see ``helpers.tiers``.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.helpers.beside import (
    AXOLOTL,
    LIGER,
    TORCHTITAN,
    TRITON,
    WITHOUT_DEPENDENCIES,
    make_environment,
)
from tests.helpers.samples import Sample
from tests.helpers.tiers import Case, between, place, quick, rest

STRIDE = 29  # a prime, so that samples do not keep step with the layers of a model
ROOT = Path(__file__).parents[1]
LANES = ("unit", "ranks", "runs")
TEMPORARY = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
RUN = pytest.StashKey["Run"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption(
        "--exhaustive", action="store_true", help="run every test and case, and sample less"
    )
    group.addoption(
        "--rest",
        action="store_true",
        help="run, as --exhaustive does, only what the quick tier leaves out or samples",
    )
    group.addoption(
        "--shard",
        type=int,
        default=0,
        metavar="N",
        help="which sample the quick tier takes, and where the rest begins",
    )
    group.addoption(
        "--minutes",
        type=float,
        metavar="M",
        help="with --rest: begin no test after so many minutes",
    )
    group.addoption(
        "--places",
        metavar="A-B",
        help="with --rest: only tests from place A to B, as a run has said",
    )
    group.addoption(
        "--lane", choices=LANES, help="only tests of this kind, and a line for .ci/run to show"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Temporary files of processes go with the tests: torchrun, for one, leaves a folder for its logs."""
    config.stash[RUN] = Run(config)
    config.pluginmanager.register(config.stash[RUN])
    folder = tempfile.TemporaryDirectory(prefix="tests_", ignore_cleanup_errors=True)
    config.stash[TEMPORARY] = folder
    os.environ["TMPDIR"] = folder.name  # this process has chosen its own already


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[TEMPORARY].cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()  # collections while modules are imported find nothing


def pytest_collection_finish() -> None:
    """What is imported by now stays: each search of a test collects garbage, and need not look at it."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor at what the tests of other modules have imported: a million objects, a second each time."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    """Whether a test should prove all it can."""
    return is_exhaustive(pytestconfig)


def is_exhaustive(config: pytest.Config) -> bool:
    return bool(config.getoption("--exhaustive") or config.getoption("--rest"))


@pytest.fixture
def shard(request: pytest.FixtureRequest) -> int:
    """Says which sample a test takes: a large number, another one for each test and each ``--shard``."""
    return place(f"{request.config.getoption('--shard')} {request.node.nodeid}")


@pytest.fixture(scope="session")
def stride(exhaustive: bool) -> int:
    """From each operation at which a test injects a failure to the next."""
    return 1 if exhaustive else STRIDE


@pytest.fixture
def sample(exhaustive: bool, shard: int) -> Sample:
    """The operations at which a test injects a failure."""
    return Sample(exhaustive, shard, 1 if exhaustive else STRIDE)


@pytest.fixture(scope="session")
def beside_trl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the library alone, transformers, PEFT and TRL."""
    return make_environment(tmp_path_factory.mktemp("beside_trl"))


@pytest.fixture(scope="session")
def beside_liger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment as ``beside_trl`` has, and Liger."""
    folder = tmp_path_factory.mktemp("beside_liger")
    return make_environment(folder, without_dependencies=LIGER)


@pytest.fixture(scope="session")
def beside_torchtitan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the library alone, and torchtitan."""
    return make_environment(tmp_path_factory.mktemp("beside_torchtitan"), TORCHTITAN, pinned=False)


@pytest.fixture(scope="session")
def beside_axolotl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the library alone, and Axolotl."""
    folder = tmp_path_factory.mktemp("beside_axolotl")
    return make_environment(
        folder, AXOLOTL, without_dependencies=WITHOUT_DEPENDENCIES, pinned=False
    )


@pytest.fixture(scope="session")
def beside_triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the library, the recipes and Triton."""
    return make_environment(tmp_path_factory.mktemp("beside_triton"), TRITON)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    all_cases = [*map(case_of, items)]
    number = config.getoption("--shard")
    yield  # -k and -m select
    if lane := config.getoption("--lane"):
        select(config, items, [item for item in items if lane_of(item) == lane])
    if config.getoption("--rest"):
        taken = {name: turn for turn, name in enumerate(rest(all_cases, number))}
        if config.getoption("--places"):
            first, end = (int(each, 16) for each in config.getoption("--places").split("-"))
            taken = {name: turn for name, turn in taken.items() if between(first, end, name)}
        chosen = [item for item in items if item.nodeid in taken]
        select(config, items, sorted(chosen, key=lambda item: taken[item.nodeid]))
    elif not config.getoption("--exhaustive"):
        taken_first = quick(all_cases, number)
        select(config, items, [item for item in items if item.nodeid in taken_first])


def select(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    names = {item.nodeid for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = chosen


def lane_of(item: pytest.Item) -> str:
    return next((lane for lane in ("ranks", "runs") if item.get_closest_marker(lane)), "unit")


def case_of(item: pytest.Item) -> Case:
    rotating = item.get_closest_marker("rotating")
    return Case(
        item.nodeid,
        exhaustive=item.get_closest_marker("exhaustive") is not None,
        sampled=isinstance(item, pytest.Function) and "exhaustive" in item.fixturenames,
        rotating=None if rotating is None else (*rotating.args, 1)[0],
        alternating=item.get_closest_marker("alternating") is not None,
        sweep=item.get_closest_marker("sweep") is not None,
    )


class Run:
    """What a run does and has done: its limit, its times, and what it says of them at its end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = time.monotonic()
        self.seconds: Counter[str] = Counter()  # of each test
        self.outcomes: Counter[str] = Counter()
        self.items: list[pytest.Item] = []
        self.ran = 0  # so many of them, from the first; the limit left the others
        self.left: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = [*session.items]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        minutes = self.config.getoption("--minutes")
        if minutes is not None and time.monotonic() - self.began > 60 * minutes:
            self.left.append(item)
            return True  # as if it was done
        self.ran += 1
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Those that the limit left are no part of the run."""
        self.config.hook.pytest_deselected(items=self.left)

    @pytest.hookimpl(trylast=True)  # after the slowest tests
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = [*self.what_ran()]
        if lines:
            terminalreporter.section("what ran")
        for line in lines:
            terminalreporter.line(line)
        if lane := self.config.getoption("--lane"):
            file = ROOT / "build" / "lanes" / f"{self.tier}_{lane}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{self.summary(lane)}\n")

    @property
    def tier(self) -> str:
        return next((t for t in ("rest", "exhaustive") if self.config.getoption(f"--{t}")), "quick")

    def what_ran(self) -> Iterator[str]:
        lane = self.config.getoption("--lane")
        if self.tier == "quick" and lane:
            shard = self.config.getoption("--shard")
            yield f"`make test-rest SHARD={shard}` runs what this has left out, or proved in part."
        if self.tier == "rest" and self.ran:
            yield f"{self.ran} of {len(self.items)} ran."
        if self.ran and self.left:
            first, end = (f"{place(each.nodeid):08x}" for each in (self.items[0], self.left[0]))
            target = f"test-{lane}" if lane else "test-rest"
            command = f"make {target} TIER=--rest SHARD={self.config.getoption('--shard')}"
            yield f"The same again: {command} PLACES={first}-{end}"
            yield f"All others:     {command} PLACES={end}-{first}"

    def summary(self, lane: str) -> str:
        slowest = [f"{s:.0f} s {name}" for name, s in self.seconds.most_common(3)]
        counts = ", ".join(f"{n} {outcome}" for outcome, n in self.outcomes.items())
        of = f" of {len(self.items)}" if self.left else ""
        took = time.monotonic() - self.began
        return (
            f"{self.tier}, {lane}: {self.ran}{of} tests in {took:.0f} s ({counts}); "
            f"slowest: {', '.join(slowest)}"
        )
