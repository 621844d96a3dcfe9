"""What training writes for people: a file in the way, or a full disk, does not end a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from torchtune_adaptive.core.sizes.split import Split
from torchtune_adaptive.recipe.train.events import EVENTS_NAME, Events


@pytest.fixture
def heard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "propagate", True)
    return caplog


def test_events_are_appended(tmp_path: Path) -> None:
    Events(tmp_path).changed(3, "out of memory", micro_batch=(4, 2), accumulation=(1, 2))
    Events(tmp_path).grown(Split(2, 1, 2), Split(4, 1, 2), 100, 5, "Geometric")
    rows = [json.loads(row) for row in (tmp_path / EVENTS_NAME).read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 5]
    assert rows[0]["micro_batch"] == [4, 2] and rows[1]["global_batch"] == [4, 8]


def test_a_folder_in_the_way_of_the_events_is_a_warning(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    (tmp_path / EVENTS_NAME).mkdir()
    Events(tmp_path).noticed(3, "allocation retries")
    assert "was not written" in heard.text and EVENTS_NAME in heard.text
