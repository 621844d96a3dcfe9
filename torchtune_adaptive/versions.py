"""End with one line if a library has a version that this release does not support.

The supported ranges are those of the package's own metadata (``pyproject.toml``). Libraries are looked up
without importing them: some unsupported combinations fail at import.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from torchtune_adaptive.errors import UnsupportedVersion
from torchtune_adaptive.shadowing import stop_if_shadowed

REASONS = {
    "torchtune": "it is torchtune's last release, and the recipes are built from its parts",
    "torchao": "torchtune 0.6.1 needs what torchao 0.16 removed",
    "torch": "older versions lack parts of FSDP2, newer ones have not been tested",
}
"""Why the range of each library that is checked is what it is."""


def require_supported_versions() -> None:
    """End the program with one line if a version is not supported."""
    stop_if_shadowed()
    try:
        check_versions()
    except UnsupportedVersion as error:
        sys.exit(f"UnsupportedVersion: {error}")


def check_versions() -> None:
    """Check all libraries whose versions matter.

    Raises:
        UnsupportedVersion: the first that is missing, too old, or too new.
    """
    supported = {r.name: r for r in map(Requirement, requires("torchtune-adaptive") or ())}
    for name, reason in REASONS.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = "not installed"
        if not _is_in(installed, supported[name]):
            raise UnsupportedVersion(
                f"torchtune-adaptive does not work with {name} {installed}: {reason}. "
                f"Install a supported version: pip install '{range_text(supported[name])}'"
            )


def range_text(requirement: Requirement) -> str:
    """``torch>=2.11,<2.16``, the lower end first."""
    return requirement.name + ",".join(sorted(map(str, requirement.specifier), reverse=True))


def _is_in(installed: str, supported: Requirement) -> bool:
    try:
        release = Version(installed).base_version  # 2.12 for 2.12.0a0+git1234, as vendors build it
    except InvalidVersion:
        return False
    return release in supported.specifier
