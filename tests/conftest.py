"""The two tiers of the tests.

The quick tier has every kind of run, and a sample of what each of them proves: memory runs out at every 29th
allocation instead of at each one; settings are compared with torchtune's in combinations, not one by one.
``--exhaustive`` runs all tests. A test that does less without the flag asks for ``exhaustive`` or ``sample``;
one that does not run at all without it is marked ``exhaustive``. Of the cases of a test that is marked
``rotating``, the quick tier runs one, or as many as the mark says, and with another SHARD others. Of the
tests of a file that are marked ``alternating``, it runs every second one, and with the next SHARD the others.
Of what the quick tier leaves out, ``--exhaustive --part K`` runs one in K, and with another SHARD others; of
the many cases of a test that is marked ``sweep``, one in thirty times K.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable
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

STRIDE = 29  # a prime, so that samples do not keep step with the layers of a model
TEMPORARY = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
LEFT_OUT = pytest.StashKey[list[pytest.Item]]()
SAMPLED = pytest.StashKey[list[pytest.Item]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption(
        "--exhaustive", action="store_true", help="run every test and case, and sample less"
    )
    group.addoption(
        "--shard",
        type=int,
        default=0,
        metavar="N",
        help=f"which sample the quick tier takes; {STRIDE} successive numbers visit every operation",
    )
    group.addoption(
        "--part",
        type=int,
        default=1,
        metavar="K",
        help="with --exhaustive: run one in K of the tests that the quick tier samples or leaves out",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Temporary files of processes go with the tests: torchrun, for one, leaves a folder for its logs."""
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


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    """Whether a test should prove all it can."""
    return bool(pytestconfig.getoption("--exhaustive"))


@pytest.fixture(scope="session")
def shard(pytestconfig: pytest.Config) -> int:
    """Says which sample is taken, so that successive runs of CI take them all."""
    return int(pytestconfig.getoption("--shard"))


@pytest.fixture(scope="session")
def stride(exhaustive: bool) -> int:
    """From each operation at which a test injects a failure to the next."""
    return 1 if exhaustive else STRIDE


@pytest.fixture(scope="session")
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
    shard = config.getoption("--shard")
    leave_to_other_shards(items, shard)
    if config.getoption("--exhaustive"):
        for item in items:
            # So that `--exhaustive -m exhaustive` is all that the quick tier owes.
            if is_sampled(item):
                item.add_marker("exhaustive")
        leave_out(config, items, other_parts(items, shard, config.getoption("--part")))
        yield  # -k and -m select
    else:
        yield
        leave_out(config, items, [item for item in items if item.get_closest_marker("exhaustive")])
        config.stash[SAMPLED] = [item for item in items if is_sampled(item)]


def leave_out(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = left_out


def is_sampled(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "exhaustive" in item.fixturenames


def leave_to_other_shards(items: Iterable[pytest.Item], shard: int) -> None:
    """Mark the alternating tests and the cases of rotating ones that are left to another shard."""
    tests: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if not item.get_closest_marker("exhaustive"):
            name = item.nodeid.partition("[")[0]
            tests.setdefault(name.partition("::")[0], {}).setdefault(name, []).append(item)
    for file, of_one_file in enumerate(tests.values()):
        alternating = [
            cases for cases in of_one_file.values() if cases[0].get_closest_marker("alternating")
        ]
        # The first tests of files are often the longest: not those of all files at once.
        for cases in alternating[(file + shard + 1) % 2 :: 2]:
            for item in cases:
                item.add_marker("exhaustive")
        for cases in of_one_file.values():
            mark = cases[0].get_closest_marker("rotating")
            if mark is None:
                continue
            taken = mark.args[0] if mark.args else 1
            # An alternating test runs with every second shard only, and then other cases than the last time.
            turn = shard // 2 if cases in alternating else shard
            for number, item in enumerate(cases):
                if (number - turn * taken) % len(cases) >= taken:
                    item.add_marker("exhaustive")


def other_parts(items: Iterable[pytest.Item], shard: int, parts: int) -> list[pytest.Item]:
    """The tests that the quick tier samples or leaves out, and that are in another part than the shard's."""
    owed = [item for item in items if item.get_closest_marker("exhaustive")]
    sweeps = [item for item in owed if item.get_closest_marker("sweep")]
    others = [item for item in owed if not item.get_closest_marker("sweep")]
    of_sweeps = 1 if parts == 1 else 30 * parts
    return [
        item
        for some, each in ((others, parts), (sweeps, of_sweeps))
        for number, item in enumerate(some)
        if (number - shard) % each
    ]


@pytest.hookimpl(trylast=True)  # after the slowest tests
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    sampled, left_out = config.stash.get(SAMPLED, []), config.stash.get(LEFT_OUT, [])
    if not sampled and not left_out:
        return
    terminalreporter.section("not proved by this run")
    for what, items in (("in part", sampled), ("left out", left_out)):
        for name, cases in by_function(items).items():
            terminalreporter.line(f"{what}: {name}" + (f" ({cases} cases)" if cases > 1 else ""))
    others = (
        "Other values of SHARD run"
        if config.getoption("--exhaustive")
        else "`make test-all`, or pytest --exhaustive, runs"
    )
    terminalreporter.line(f"{others} these.")


def by_function(items: Iterable[pytest.Item]) -> Counter[str]:
    return Counter(item.nodeid.partition("[")[0] for item in items)
