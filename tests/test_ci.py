"""What CI and the docs tell people to type exists."""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from contextlib import nullcontext
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import yaml

from tests.helpers.what_ran import LANES

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
WORKFLOWS = sorted(WORKFLOW.parent.glob("*.yml"))
TARGETS = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def steps() -> list[dict[str, Any]]:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "CONTRIBUTING.md",
        "Makefile",
        ".ci/run",
        WORKFLOW,
        WORKFLOW.with_name("release.yml"),
    ],
)
def test_every_make_target_that_is_named_exists(path: str | Path) -> None:
    commands = r"^(?:exec |# +| +(?:- run: )?)?make +([a-z-]+)"
    named = re.findall(commands, (ROOT / path).read_text(), flags=re.MULTILINE)
    assert named and set(named) <= set(TARGETS)


def test_the_exhaustive_jobs_are_together_make_test_all() -> None:
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["exhaustive"]
    command = "make ${{ matrix.tests }} TIER=--exhaustive SHARD=${{ github.run_number }}"
    assert job["steps"][-1]["run"] == command
    lanes = re.search(
        r"^LANES = .*?((?: test-\w+)+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert lanes is not None and job["strategy"]["matrix"]["tests"] == lanes[1].split()


def test_the_quick_job_runs_on_every_python_that_is_claimed() -> None:
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["quick"]
    claimed = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert job["strategy"]["matrix"]["python"] == claimed


@pytest.mark.parametrize("tier", ["", "--exhaustive", "--rest"])
def test_a_target_of_each_tier_runs_all_lanes(tier: str) -> None:
    target = {"": "test", "--exhaustive": "test-all", "--rest": "test-rest"}[tier]
    plain = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    command = ["make", "-n", target, "SHARD=7", "MINUTES=3"]
    shown = subprocess.run(
        command, cwd=ROOT, env=plain, check=True, timeout=300, stdout=PIPE, text=True
    ).stdout
    options = [line.split() for line in re.findall("-m pytest(.*)", shown)]
    given = ["--minutes", "3", *tier.split()]
    assert sorted(map(sorted, options)) == [
        sorted(["--shard", "7", "--lane", lane, *given]) for lane in sorted(LANES)
    ]


@pytest.mark.parametrize("path", ["CONTRIBUTING.md", "Makefile"])
def test_every_test_that_is_named_exists(path: str) -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / path).read_text())
    assert named and all((ROOT / name).is_file() for name in named)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_its_actions_cannot_change(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        # What asks for a token of the trusted publisher runs nothing of this repository.
        publishes = (path.stem, name) == ("release", "publish")
        assert job["permissions"] == ({"id-token": "write"} if publishes else {"contents": "read"})
        assert not publishes or all("make" not in step.get("run", "") for step in job["steps"])
    every = [step for job in workflow["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in every if "uses" in step]
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)


def test_the_workflow_tests_what_it_changes_to() -> None:
    """The torch version is exchanged in the constraints, where it must be found."""
    (exchange,) = [step["run"] for step in steps() if "sed" in step.get("run", "")]
    pattern = re.search(r"s/(.*?)/", exchange)
    assert pattern is not None
    assert re.search(pattern[1], (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("category", [DeprecationWarning, SyntaxWarning])
def test_an_invalid_escape_sequence_of_torchaos_does_not_end_a_run(category: type[Warning]) -> None:
    """Python warns when it compiles the file: before 3.12 with one category, then with the other."""
    for path, ignored in (("site-packages/torchao/nf4.py", True), ("tests/test_ci.py", False)):
        with nullcontext() if ignored else pytest.raises(category):
            warnings.warn_explicit("invalid escape sequence", category, str(ROOT / path), 1)
