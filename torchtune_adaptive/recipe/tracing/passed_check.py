"""Whether the self-check has passed here before. Apart from the check itself, so that this needs no torch."""

from __future__ import annotations

from torchtune_adaptive.common import Cache, cache_folder, libraries, package_fingerprint


class PassedCheck:
    """The result of the self-check with the installed versions, if it passed.

    Args:
        cache: the run's setting: where it is kept.
    """

    def __init__(self, cache: bool | str) -> None:
        self._kept: Cache[bool] = Cache(
            cache_folder(cache, "self_checks"), "self-check", lambda value: value is True
        )
        self._facts = {"libraries": libraries(), "code": package_fingerprint()}

    def is_known(self) -> bool:
        return self._kept.get(self._facts) is True

    def remember(self) -> None:
        self._kept.put(self._facts, True)
