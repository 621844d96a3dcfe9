"""The batch size of a run: found by search, or taken from a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

from torchtune_adaptive.search.budget_report import BudgetReport
from torchtune_adaptive.search.report import SearchReport

log = logging.getLogger(__name__)


def announce(report: SearchReport | BudgetReport, output_dir: Path) -> None:
    """Say what was found, and write it down."""
    log.info(report.text())
    files = report.write(output_dir)
    log.info(f"In detail: {', '.join(map(str, files))}")
    if isinstance(report, SearchReport) and report.uses_what_was_found:
        log.info(f"To use it without searching: {report.overrides()}")
