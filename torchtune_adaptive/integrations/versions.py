"""The versions of other libraries that have been tested.

What is relied on in them, where they promise nothing, are the facts of the tests, which run with the newest
versions every week.
"""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from torchtune_adaptive.common import UsageError

TESTED = {
    "transformers": ("5.16", "5.23"),
    "trl": ("1.9", "1.16"),
    "accelerate": ("1.10", "1.15"),
    "lightning": ("2.6", "2.6"),
    "torchtitan": ("0.3", "0.3"),
}
"""The lowest versions that the tests pass with, and the newest. Below, gradients would silently be others:
transformers 5.4 scales the loss in ``accelerator.backward`` as well, and 5.14 takes a mean of label smoothing
over a batch."""


def check_versions(*names: str) -> None:
    """Warn, once, where a library is newer than what has been tested, and refuse one that is too old."""
    for name in names:
        lowest, newest = TESTED[name]
        try:
            installed = Version(version(name))
        except PackageNotFoundError:
            continue
        if installed.release[:2] < Version(lowest).release[:2]:
            raise UsageError(
                f"{name}: {installed} is installed, and {lowest} or newer is needed: before, gradients "
                f"or logs would differ. Upgrade it."
            )
        if installed.release[:2] > Version(newest).release[:2]:
            warnings.warn(
                f"torchtune_adaptive has been tested with {name} {newest}, and {installed} is installed.",
                stacklevel=2,
            )
