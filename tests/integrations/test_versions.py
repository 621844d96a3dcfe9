"""A version that has not been tested is said, once."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from torchtune_adaptive import UsageError
from torchtune_adaptive.common import tested_versions as versions


def test_a_newer_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"transformers": "5.24.0.dev0", "trl": "1.16.9", "lightning": "2.6"}
    monkeypatch.setattr(
        versions, "versions_of", lambda *names: {name: installed[name] for name in names}
    )
    tested = {"transformers": ("5.16", "5.23"), "trl": ("1.9", "1.16"), "lightning": ("2.6", "2.6")}
    monkeypatch.setattr(versions, "TESTED", tested)
    with pytest.warns(UserWarning, match=r"transformers 5\.23, and 5\.24\.0\.dev0") as seen:
        versions.check_versions("transformers", "trl", "lightning")
    assert len(seen) == 1


@pytest.mark.parametrize("name", versions.TESTED)
def test_a_version_that_is_too_old_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "versions_of", lambda name: {name: "0.2.3"})
    with pytest.raises(UsageError, match=rf"{name}: 0\.2\.3 is installed, and \d+\.\d+ or newer"):
        versions.check_versions(name)


def test_some_need_a_higher_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "versions_of", lambda name: {name: "1.8.2"})
    versions.check_versions("trl")
    with pytest.raises(UsageError, match=r"trl: 1\.8\.2 is installed, and 1\.9 or newer"):
        versions.check_versions("trl", trl="1.9")


def test_ci_runs_the_lowest_versions() -> None:
    workflow = Path(__file__).parents[2] / ".github" / "workflows" / "trainers.yml"
    rows = yaml.safe_load(workflow.read_text())["jobs"]["trainers"]["strategy"]["matrix"]["include"]
    named = re.findall(r"(\w+)==(\d+\.\d+)", " ".join(row["trainers"] for row in rows))
    lowest = {
        name: min((v for n, v in named if n == name), key=Version) for name in versions.TESTED
    }
    assert lowest == {name: oldest for name, (oldest, _) in versions.TESTED.items()}
    extras = tomllib.loads((Path(__file__).parents[2] / "library" / "pyproject.toml").read_text())
    bounds = extras["project"]["optional-dependencies"]["trainers"]
    # torchtitan needs other versions of the same packages, so it is not among them.
    assert dict(bound.split(">=") for bound in bounds) | {"torchtitan": "0.3"} == lowest
