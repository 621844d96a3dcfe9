"""The record of a run: the config that it trained with, and ``report.html``, which shows all of it."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import (
    AdaptiveBatchingError,
    as_svg,
    bytes_of,
    duration,
    not_essential,
    page,
    save,
)
from torchtune_adaptive.core import Split
from torchtune_adaptive.recipe.search.budget_report import BudgetReport
from torchtune_adaptive.recipe.search.size_report import SearchReport
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.kinds import FOUND
from torchtune_adaptive.recipe.train.events import EVENTS_NAME
from torchtune_adaptive.recipe.train.instruments import PLOT_NAME
from torchtune_adaptive.recipe.train.loop import TrainingLoop

log = logging.getLogger(__name__)
REPORT_NAME = "report.html"
_MOST_EVENTS = 500  # of the newest
CONFIG_NAME = "torchtune_config.yaml"
"""As torchtune's metric loggers call it, which replace it by the one that they are given."""


@dataclass
class Record:
    """What is known about a run, on rank 0. A file that cannot be written does not end the run."""

    cfg: DictConfig
    kind: str
    """Of the recipe."""
    ranks: int
    logger: Any
    """torchtune's metric logger."""
    began: datetime = field(default_factory=datetime.now)
    search: SearchReport | BudgetReport | None = None
    loop: TrainingLoop | None = None
    _config_is_logged: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.cfg.output_dir)

    # --- what the run is made of ----------------------------------------------------------------------

    def save_config(self) -> Path:
        """Write the config as it is given, unless an earlier run's is there: this one may not begin, as
        where that one is finished. Where it is, for messages."""
        path = self.folder / CONFIG_NAME
        if path.is_file():
            return path
        with not_essential("The config"):
            self.folder.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(self.cfg, path)
        return path

    def decided(self, batch: Split, step: int, report: SearchReport | BudgetReport | None) -> None:
        """The batch that training starts with, and the search that found it, if there was one."""
        self.search = report
        self.cfg = deepcopy(self.cfg)  # the run still works with its own
        self.cfg.batch_size = batch.micro_batch
        self.cfg.gradient_accumulation_steps = batch.accumulation
        if report is not None:
            found = report.numbers()
            OmegaConf.update(self.cfg, FOUND, found, force_add=True)
            self.logger.log_dict(
                {f"search/{key}": value for key, value in found.items()}, step=step
            )
        if isinstance(report, BudgetReport) and not report.used:
            OmegaConf.update(self.cfg, f"{BLOCK}.token_budget", False, force_add=True)
        self._log_config()
        if report is not None:
            self.write(running=True)

    def _log_config(self) -> None:
        """Once: W&B refuses values that change."""
        if not self._config_is_logged:
            self._config_is_logged = True
            self.logger.log_config(self.cfg)

    # --- the report -----------------------------------------------------------------------------------

    def close(self, error: BaseException | None) -> None:
        """Write the report and the plot at the end of a run, whatever ended it."""
        has_begun = self.search is not None or self.loop is not None
        if not has_begun and (self.folder / REPORT_NAME).is_file():
            return  # that of an earlier run, of which this one has changed nothing
        self._log_config()
        changes = self.loop and (self.loop.runner.recovery or self.loop.adaptation.growth.grows)
        if self.loop is not None and changes:
            with not_essential("The plot of the run"):
                if figure := self.loop.metrics.history.figure():
                    save(figure, self.folder / PLOT_NAME)
        if path := self.write(error):
            log.info(f"Report: {path}. Everything else: {self.folder}")

    def write(self, error: BaseException | None = None, running: bool = False) -> Path | None:
        """Write the report; where it is, or None."""
        path = self.folder / REPORT_NAME
        try:
            html = self.html(error, running)
        except Exception as problem:  # whatever it is, it is not worth a run
            log.warning(
                f"The report of the run could not be made: {problem!r}. Please report this."
            )
            return None
        with not_essential("The report of the run"):
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(html)
            return path
        return None

    def html(self, error: BaseException | None = None, running: bool = False) -> str:
        parts = [self._summary(error, running), self._search(), self._training(), self._events()]
        config = OmegaConf.to_yaml(self.cfg, resolve=True, sort_keys=True)
        parts.append(page.section("Config", page.folded("as trained with", config)))
        return page.page(f"Run {self.folder.name} ({self.kind})", parts)

    def _summary(self, error: BaseException | None, running: bool) -> str:
        summary = self.loop.summary if self.loop else None
        state = "running" if running else "finished"
        if error is not None:
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        values = {
            "state": state,
            "began": f"{self.began:%Y-%m-%d %H:%M:%S}",
            "written": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "output": str(self.folder.absolute()),
        }
        if self.loop is not None:
            split = self.loop.adaptation.split
            values["global batch"] = f"{split.global_batch} rows ({split.text()})"
            values["steps"] = f"{self.loop.global_step:,}"
            values["retried steps"] = f"{self.loop.runner.retried_steps:,}"
        if summary is not None:
            values["time"] = duration(summary.seconds)
            values["speed"] = f"{summary.tokens_per_second:,.0f} tokens/s over {self.ranks} ranks"
            values["loss"] = summary.loss_text().removeprefix("loss ")
            if summary.capacity is not None:
                values["peak memory"] = bytes_of(summary.peak_bytes, summary.capacity)
        why = [] if error is None else [page.failure(_reason(error))]
        return page.section("Summary", *why, page.facts(values))

    def _search(self) -> str:
        if self.search is None:
            return page.section(
                "Search", page.paragraph("There was no search: batch_size is as configured.")
            )
        paragraphs = [page.paragraph(line) for line in self.search.text().splitlines()]
        header, rows = self.search.trial_table()
        return page.section(
            "Search", *paragraphs, _drawn(self.search.figure()), page.table(header, rows)
        )

    def _training(self) -> str:
        if self.loop is None or not self.loop.metrics.losses:
            return page.section("Training and memory", page.paragraph("No step has been trained."))
        return page.section("Training and memory", _drawn(self.loop.metrics.history.figure()))

    def _events(self) -> str:
        path = self.folder / EVENTS_NAME
        if not path.is_file():
            return page.section("Events", page.paragraph("Nothing changed the batch in training."))
        events = []
        for line in path.read_text().splitlines()[-_MOST_EVENTS:]:
            with suppress(ValueError):  # a run that was killed has left a part of a line
                events.append(json.loads(line))
        rows = [
            (
                str(event.pop("step")),
                event.pop("reason"),
                "; ".join(
                    f"{key.replace('_', ' ')} {_change(what)}" for key, what in event.items()
                ),
            )
            for event in events
        ]
        return page.section("Events", page.table(("step", "reason", "change"), rows))


def _change(what: Any) -> str:
    return " -> ".join(map(str, what)) if isinstance(what, list) else str(what)


def _reason(error: BaseException) -> str:
    if isinstance(error, (AdaptiveBatchingError, KeyboardInterrupt)):
        return f"{type(error).__name__}: {error}"
    import traceback

    return "".join(traceback.format_exception(error))


def _drawn(figure: Any) -> str:
    if figure is None:
        return page.paragraph(
            "There is no plot: too few steps, or matplotlib is not installed "
            "(pip install 'torchtune-adaptive[plot]').",
            "note",
        )
    return as_svg(figure)
