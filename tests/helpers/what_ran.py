"""The lanes of the tests, their limit, and what is said at their end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.helpers.tiers import place

LANES = ("unit", "ranks", "runs")
"""Run in parallel; the marks of the last two say which tests they have."""


def lane_of(item: pytest.Item) -> str:
    return next((lane for lane in LANES[1:] if item.get_closest_marker(lane)), "unit")


class WhatRan:
    """Ends a run at its limit, and says at its end what ran, and for how long."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = time.monotonic()
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
            return True  # as if it had run
        self.ran += 1
        return None

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
            file = self.config.rootpath / "build" / "lanes" / f"{self.tier}_{lane}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{self.summary(lane, terminalreporter)}\n")

    @property
    def tier(self) -> str:
        return next((t for t in ("rest", "exhaustive") if self.config.getoption(f"--{t}")), "quick")

    def what_ran(self) -> Iterator[str]:
        lane = self.config.getoption("--lane")
        if self.tier == "quick" and lane:
            shard = self.config.getoption("--shard")
            yield f"`make test-rest SHARD={shard}` runs what this has left out, or proved in part."
        if self.tier == "rest":
            yield f"{self.ran} of {len(self.items)} ran."
        if self.ran and self.left:
            first, end = (f"{place(each.nodeid):08x}" for each in (self.items[0], self.left[0]))
            target = f"test-{lane}" if lane else "test-rest"
            command = f"make {target} TIER=--rest SHARD={self.config.getoption('--shard')}"
            yield f"The same again: {command} PLACES={first}-{end}"
            yield f"All others:     {command} PLACES={end}-{first}"

    def summary(self, lane: str, reporter: pytest.TerminalReporter) -> str:
        seconds = Counter[str]()  # of each test
        for reports in reporter.stats.values():
            for each in reports:
                if isinstance(each, pytest.TestReport):
                    seconds[each.nodeid] += each.duration
        slowest = [f"{s:.0f} s {name}" for name, s in seconds.most_common(3)]
        outcomes = ("passed", "failed", "error", "skipped", "xfailed")
        counts = ", ".join(f"{len(reporter.stats[o])} {o}" for o in outcomes if o in reporter.stats)
        of = f" of {len(self.items)}" if self.left else ""
        took = time.monotonic() - self.began
        return (
            f"{self.tier}, {lane}: {self.ran}{of} tests in {took:.0f} s ({counts}); "
            f"slowest: {', '.join(slowest)}"
        )
