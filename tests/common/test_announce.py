"""What people see without having configured logging, and only once where they have."""

from __future__ import annotations

import logging

import pytest

from torchtune_adaptive.common import announce

OURS = logging.getLogger("torchtune_adaptive")
LOG = logging.getLogger("torchtune_adaptive.somewhere")


def configured(
    patch: pytest.MonkeyPatch, level: int = logging.NOTSET, handler_of: str | None = None
) -> list[str]:
    """Configure logging in this way only, without pytest's; gives what a handler gets."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    for logger in (OURS, logging.getLogger()):
        patch.setattr(logger, "handlers", [handler] * (logger.name == handler_of))
    patch.setattr(OURS, "level", level)
    logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]  # of levels
    return seen


def test_where_nothing_is_configured_rank_zero_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configured(monkeypatch)
    announce(LOG, "micro-batch 4", rank_zero=True)
    announce(LOG, "micro-batch 4", rank_zero=False)
    announce(LOG, "4 -> 2", logging.WARNING, rank_zero=False)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "torchtune_adaptive: micro-batch 4\n")


@pytest.mark.parametrize("name", ["root", "torchtune_adaptive"])
def test_a_handler_gets_the_line_in_place_of_the_screen(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = configured(monkeypatch, logging.INFO, name)
    announce(LOG, "micro-batch 4", rank_zero=True)
    announce(LOG, "micro-batch 4", rank_zero=False)
    assert seen == ["micro-batch 4"] and capsys.readouterr().err == ""


def test_a_level_silences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configured(monkeypatch, logging.WARNING)
    announce(LOG, "micro-batch 4", rank_zero=True)
    announce(LOG, "4 -> 2", logging.WARNING, rank_zero=True)
    assert capsys.readouterr().err == "torchtune_adaptive: 4 -> 2\n"


def test_a_script_that_gives_the_root_logger_a_handler_sees_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As all of transformers' examples do, which set the level of their own logger."""
    seen, root = configured(monkeypatch, handler_of="root"), logging.getLogger()
    for level, lines in ((logging.WARNING, 1), (logging.ERROR, 1), (logging.INFO, 2)):
        monkeypatch.setattr(root, "level", level)
        logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]
        announce(LOG, "micro-batch 4", rank_zero=True)
        assert len(seen) == lines
    assert capsys.readouterr().err == ""
