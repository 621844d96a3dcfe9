"""End with one line if a library has a version that this release does not support.

The supported ranges are those of the package's own metadata (``pyproject.toml``), except that torchtune's
main branch needs another torchao than its last release does, which metadata cannot say. Libraries are looked
up without importing them: some unsupported combinations fail at import.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from torchtune_adaptive.common import UnsupportedVersion, end, end_if_in_vain, launcher
from torchtune_adaptive.recipe.shadowing import stop_if_shadowed

OLDEST_PYTHON = (3, 11)
REASONS = {
    "torchtune": "the recipes are built from parts of its last release, 0.6.1, and of its main branch, 0.7.0",
    "torchao": "torchtune 0.6.1 needs what torchao 0.16 removed",
    "torch": "older versions lack parts of FSDP2, newer ones have not been tested",
}
"""The libraries that are checked, and the reasons for their ranges."""

MAIN = Version("0.7.0")
"""The version of torchtune's main branch, which is installed from source."""

WITH_MAIN = {
    "torchao": (
        Requirement("torchao>=0.18,<0.19"),
        "torchtune's main branch needs what torchao 0.18 brought, and newer ones have not been tested",
    )
}
"""The ranges that are different with it, and the reasons."""


def require_supported_versions() -> None:
    """End the program with one line if a version is not supported, or at once if an earlier attempt has ended
    for a reason that stays; before anything of them is imported."""
    launcher.stop_when_it_ends()
    end_if_in_vain()
    _hush_libraries()
    stop_if_shadowed()
    try:
        check_versions()
    except UnsupportedVersion as error:
        end(f"UnsupportedVersion: {error}")


def _hush_libraries() -> None:
    """Leave out what libraries say when they are imported, and bars that a file would keep."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    if not sys.stderr.isatty() or launcher.rank() != 0:
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def check_versions() -> None:
    """Check Python and all libraries whose versions matter.

    Raises:
        UnsupportedVersion: the first that is missing, too old, or too new.
    """
    if sys.version_info < OLDEST_PYTHON:
        raise UnsupportedVersion(
            f"torchtune-adaptive needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer, and this is "
            f"{sys.version.split()[0]} ({sys.executable}). Make a virtual environment with a newer one."
        )
    supported = {r.name: r for r in map(Requirement, requires("torchtune-adaptive") or ())}
    for name, reason in REASONS.items():
        wanted = supported[name]
        if name in WITH_MAIN and _is_in(_installed("torchtune"), Requirement(f"torchtune>={MAIN}")):
            wanted, reason = WITH_MAIN[name]
        if not _is_in(installed := _installed(name), wanted):
            raise UnsupportedVersion(
                f"torchtune-adaptive does not work with {name} {installed}: {reason}. "
                f"Install a supported version: pip install '{range_text(wanted)}'"
            )


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def range_text(requirement: Requirement) -> str:
    """``torch>=2.11,<2.16``, the lower end first."""
    return requirement.name + ",".join(sorted(map(str, requirement.specifier), reverse=True))


def _is_in(installed: str, supported: Requirement) -> bool:
    try:
        release = Version(installed).base_version  # 2.12 for 2.12.0a0+git1234, as vendors build it
    except InvalidVersion:
        return False
    return release in supported.specifier
