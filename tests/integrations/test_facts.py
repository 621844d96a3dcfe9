"""A version that has not been tested is said, once."""

from __future__ import annotations

import pytest

from torchtune_adaptive.integrations import facts


def test_a_newer_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"transformers": "5.24.0.dev0", "trl": "1.16.9"}
    monkeypatch.setattr(facts, "version", lambda name: installed.get(name, "0.1"))
    monkeypatch.setattr(
        facts, "TESTED", {"transformers": "5.23", "trl": "1.16", "accelerate": "1.15"}
    )
    with pytest.warns(UserWarning, match=r"transformers 5\.23, and 5\.24\.0\.dev0") as seen:
        facts.warn_of_untested_versions()
    assert len(seen) == 1
