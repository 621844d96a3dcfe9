"""The tiers of the tests.

The quick tier has every kind of run, and a sample of what each of them proves: memory runs out at every 29th
allocation instead of at each one; settings are compared with torchtune's in combinations, not one by one.
``--exhaustive`` runs all tests. A test that does less without the flag asks for ``exhaustive`` or ``sample``;
one that does not run at all without it is marked ``exhaustive``. Of the cases of a test that is marked
``rotating``, the quick tier runs one, or as many as the mark says. Of the tests of a file that are marked
``alternating``, it runs a third.

``--rest`` runs what the quick tier leaves out or samples, in an order of its own, and begins no test after
``--minutes``. Which ones the tiers take is a function of names and of ``--shard``: see ``helpers.tiers``.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.helpers.beside import (
    AXOLOTL,
    LIGER,
    LLAMA_FACTORY,
    TORCHTITAN,
    TRITON,
    WITHOUT_DEPENDENCIES,
    make_environment,
)
from tests.helpers.samples import Sample
from tests.helpers.tiers import Case, between, place, quick, rest
from tests.helpers.what_ran import LANES, WhatRan, lane_of

STRIDE = 29  # a prime, so that samples do not keep step with the layers of a model
TEMPORARY = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


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
        type=places,
        metavar="A-B",
        help="with --rest: only tests from place A to B, as a run has said",
    )
    group.addoption(
        "--lane", choices=LANES, help="only tests of this kind, and a line for .ci/run to show"
    )


def places(text: str) -> tuple[int, int]:
    """The first place and the end of what ``--places`` asks for."""
    if not re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{8}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form 0123abcd-4567cdef. Take it from the end of a run's output"
        )
    first, end = (int(each, 16) for each in text.split("-"))
    return first, end


def pytest_configure(config: pytest.Config) -> None:
    """Temporary files of processes go with the tests: torchrun, for one, leaves a folder for its logs."""
    config.pluginmanager.register(WhatRan(config))
    folder = tempfile.TemporaryDirectory(prefix="tests_", ignore_cleanup_errors=True)
    config.stash[TEMPORARY] = folder
    os.environ["TMPDIR"] = folder.name  # this process has chosen its own already
    for option in ("--minutes", "--places"):
        if config.getoption(option) is not None and not config.getoption("--rest"):
            reason = "only the rest has an order of its own. Add --rest, or use `make test-rest`"
            raise pytest.UsageError(f"{option}: {reason}")


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
    """Freeze what the tests of a file have imported, when those of another one begin.

    Else the garbage collections of searches look at it: one test took 48 seconds, and takes 3.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    """Whether a test should prove all it can."""
    return bool(pytestconfig.getoption("--exhaustive") or pytestconfig.getoption("--rest"))


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
def beside_llama_factory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the library alone, and LLaMA-Factory; sound cannot be read there."""
    folder = tmp_path_factory.mktemp("beside_llama_factory")
    alone = ("llamafactory==0.9.5",)
    python = make_environment(folder, LLAMA_FACTORY, without_dependencies=alone, pinned=False)
    (next(folder.glob("lib/*/site-packages")) / "torchaudio.py").touch()
    return python


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
        if arc := config.getoption("--places"):
            taken = {name: turn for name, turn in taken.items() if between(*arc, name)}
        chosen = [item for item in items if item.nodeid in taken]
        select(config, items, sorted(chosen, key=lambda item: taken[item.nodeid]))
    elif not config.getoption("--exhaustive"):
        taken_first = quick(all_cases, number)
        select(config, items, [item for item in items if item.nodeid in taken_first])


def select(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    names = {item.nodeid for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = chosen


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
