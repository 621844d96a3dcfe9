"""What CI and the docs tell people to type exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
TARGETS = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def steps() -> list[dict[str, Any]]:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "Makefile", ".ci/run", WORKFLOW])
def test_every_make_target_that_is_named_exists(path: str | Path) -> None:
    commands = r"^(?:exec |# +| +(?:- run: )?)?make +([a-z-]+)"
    named = re.findall(commands, (ROOT / path).read_text(), flags=re.MULTILINE)
    assert named and set(named) <= set(TARGETS)


@pytest.mark.parametrize("path", ["CONTRIBUTING.md", "Makefile"])
def test_every_test_that_is_named_exists(path: str) -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / path).read_text())
    assert named and all((ROOT / name).is_file() for name in named)


def test_the_workflow_may_only_read_and_its_actions_cannot_change() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
    actions = [step["uses"] for step in steps() if "uses" in step]
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)


def test_the_workflow_tests_what_it_changes_to() -> None:
    """The torch version is exchanged in the constraints, where it must be found."""
    (exchange,) = [step["run"] for step in steps() if "sed" in step.get("run", "")]
    pattern = re.search(r"s/(.*?)/", exchange)
    assert pattern is not None
    assert re.search(pattern[1], (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
