"""Stop with one line where a library is of a version that this release was not made for.

Looks at what is installed without importing it: some unsupported combinations fail already at import.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from torchtune_adaptive.errors import UnsupportedVersion
from torchtune_adaptive.shadowing import stop_if_shadowed

# From the first version to, but not including, the last; and why.
SUPPORTED = {
    "torchtune": ((0, 6, 1), (0, 6, 2), "its last release; the recipes are built from its parts"),
    "torchao": ((0, 13), (0, 16), "torchtune 0.6.1 needs what 0.16 removed"),
    "torch": ((2, 11), (2, 16), "older ones lack parts of FSDP2, newer ones are not tried yet"),
}


def require_supported_versions() -> None:
    """End the program with one line where a version is not supported."""
    stop_if_shadowed()
    try:
        check_versions()
    except UnsupportedVersion as error:
        sys.exit(f"UnsupportedVersion: {error}")


def check_versions() -> None:
    """Raises ``UnsupportedVersion`` at the first library that is missing, too old, or too new."""
    for name, (first, end, reason) in SUPPORTED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = "not installed"
        if not first <= _numbers(installed) < end:
            wanted = f"{name}>={_dotted(first)},<{_dotted(end)}"
            raise UnsupportedVersion(
                f"torchtune-adaptive does not work with {name} {installed}: {reason}. "
                f"Install a supported one: pip install '{wanted}'"
            )


def _numbers(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> (2, 13, 0); a text without a version is below every version."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not part[:1].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
