"""The versions of other libraries that have been tested, and what is said of others.

What is relied on in them, where they promise nothing, are the facts of the tests, which run with the newest
versions every week.
"""

from __future__ import annotations

import warnings

from torchtune_adaptive.common.cache import versions_of
from torchtune_adaptive.common.errors import UsageError

TESTED = {
    "transformers": ("5.6", "5.23"),
    "trl": ("0.24", "1.16"),
    "accelerate": ("1.10", "1.15"),
    "lightning": ("2.6", "2.6"),
    "torchtitan": ("0.3", "0.3"),
}
"""The lowest versions that the tests pass with, and the newest. Gradients would silently be others below:
transformers 5.4 scales the loss in ``accelerator.backward`` as well."""


def check_versions(*names: str, **at_least: str) -> None:
    """Warn where a library is newer than was tested, and refuse one that is older, or than ``at_least``."""
    from packaging.version import Version  # which trainers need, and the library alone does not

    for name, installed in versions_of(*names).items():
        lowest, newest = TESTED[name]
        lowest = at_least.get(name, lowest)
        release = Version(installed or newest).release[:2]
        if release < Version(lowest).release:
            raise UsageError(
                f"{name}: {installed} is installed, and {lowest} or newer is needed: before, gradients "
                "or logs would differ. Upgrade it; where another library needs this one, train without."
            )
        if release > Version(newest).release:
            warnings.warn(
                f"torchtune_adaptive has been tested with {name} {newest}, and {installed} is installed.",
                stacklevel=2,
            )
