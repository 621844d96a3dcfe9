"""What is put into modules as they are imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtune_adaptive.planner.programs.imports import WhenImported


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WhenImported]:
    (tmp_path / "one_to_follow.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    made = WhenImported()
    yield made
    sys.meta_path.remove(made)
    sys.modules.pop("one_to_follow", None)


def test_who_asks_whether_a_module_is_there_does_not_import_it(imports: WhenImported) -> None:
    called: list[str] = []
    imports.call("one_to_follow", lambda module: called.append(module.__name__))
    assert importlib.util.find_spec("one_to_follow") and called == []
    importlib.import_module("one_to_follow")
    importlib.reload(sys.modules["one_to_follow"])
    assert called == ["one_to_follow"]
