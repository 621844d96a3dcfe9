"""Unsupported libraries: one line, with the command that fixes it."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers.beside import needed_by_recipes
from torchtune_adaptive.common.errors import UnsupportedVersion
from torchtune_adaptive.recipe import versions

ROOT = Path(__file__).parents[2]
GOOD = {"torch": "2.13.0+cpu", "torchtune": "0.6.1", "torchao": "0.15.0"}


def install(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    def version(name: str) -> str:
        found = {**GOOD, **changed}[name]
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize(
    "torch", ["2.11.0", "2.13.0+cpu", "2.15.0", "2.15.1+cu130", "2.12.0a0+git1234"]
)
@pytest.mark.parametrize("torchao", ["0.13.0", "0.15.0", "0.14.1+cu126"])
def test_supported(torch: str, torchao: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch=torch, torchao=torchao)
    versions.check_versions()


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr("sys.version_info", (3, 10, 14))
    with pytest.raises(UnsupportedVersion, match=r"needs Python 3\.11 or newer, and this is"):
        versions.check_versions()


def test_the_oldest_python_is_the_same_everywhere() -> None:
    oldest = ".".join(map(str, versions.OLDEST_PYTHON))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={oldest}"
    assert f"sys.version_info >= {versions.OLDEST_PYTHON}" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("name", "version", "mend"),
    [
        ("torch", "2.10.0", "pip install 'torch>=2.11,<2.16'"),
        ("torch", "2.16.0", "pip install 'torch>=2.11,<2.16'"),
        ("torch", "3.0", "pip install 'torch>=2.11,<2.16'"),
        ("torchao", "0.12.0", "pip install 'torchao>=0.13,<0.16'"),
        ("torchao", "0.16.0", "pip install 'torchao>=0.13,<0.16'"),
        ("torchao", None, "pip install 'torchao>=0.13,<0.16'"),
        ("torchtune", "0.6.0", "pip install 'torchtune>=0.6.1,<0.8'"),
        ("torchtune", "0.8.0", "pip install 'torchtune>=0.6.1,<0.8'"),
        ("torch", "unknown", "pip install 'torch>=2.11,<2.16'"),
    ],
)
def test_unsupported(
    name: str, version: str | None, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **{name: version})
    with pytest.raises(UnsupportedVersion) as raised:
        versions.check_versions()
    message = str(raised.value)
    assert f"does not work with {name} {version or 'not installed'}: " in message
    assert mend in message and "\n" not in message


def test_torchtunes_main_branch_needs_a_newer_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torchtune="0.7.0+cpu", torchao="0.18.0")
    versions.check_versions()
    install(monkeypatch, torchtune="0.7.0", torchao="0.15.0")
    with pytest.raises(UnsupportedVersion, match=r"pip install 'torchao>=0.18,<0.19'"):
        versions.check_versions()
    install(monkeypatch, torchtune="0.6.1", torchao="0.18.0")
    with pytest.raises(UnsupportedVersion, match=r"pip install 'torchao>=0.13,<0.16'"):
        versions.check_versions()


def test_ranges_are_written_once() -> None:
    """In pyproject.toml, whose ranges the metadata repeats, and in the README, for people."""
    written = {r.name: r for r in needed_by_recipes()}
    library = tomllib.loads((ROOT / "library" / "pyproject.toml").read_text())["project"]
    assert written["torch"] in map(Requirement, library["dependencies"])
    installed = {r.name: r for r in map(Requirement, requires("torchtune-adaptive") or ())}
    readme = (ROOT / "README.md").read_text()
    for name in versions.REASONS:
        assert installed[name].specifier == written[name].specifier
        ends = {one.operator: one.version for one in written[name].specifier}
        if "==" in ends:
            text = ends["=="]
        else:
            major, minor = ends["<"].split(".")
            text = f"{ends['>=']} to {major}.{int(minor) - 1}"
        assert f"{name} {text}" in readme


def test_this_environment_is_supported() -> None:
    versions.check_versions()
