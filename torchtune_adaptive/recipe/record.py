"""The record of a run: the config that it trained with, and ``report.html``, which shows all of it."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import (
    AdaptiveBatchingError,
    Block,
    Gallery,
    Listing,
    Paragraph,
    Table,
    Verbatim,
    as_page,
    bytes_of,
    counted,
    durable,
    duration,
    not_essential,
    plots,
)
from torchtune_adaptive.core import Split
from torchtune_adaptive.recipe.checkpoints.folder import last_saved
from torchtune_adaptive.recipe.origin import Origin, versions
from torchtune_adaptive.recipe.search.report import Report
from torchtune_adaptive.recipe.settings.keys import FOUND
from torchtune_adaptive.recipe.settings.kind_table import KINDS
from torchtune_adaptive.recipe.settings.secrets import shown_config
from torchtune_adaptive.recipe.train import curves
from torchtune_adaptive.recipe.train.attempts import Attempts
from torchtune_adaptive.recipe.train.events import EVENTS_NAME
from torchtune_adaptive.recipe.train.metrics import Trained
from torchtune_adaptive.recipe.train.watched import shares

log = logging.getLogger(__name__)
REPORT_NAME = "report.html"
_MOST_EVENTS = 500  # of the newest
CONFIG_NAME = "torchtune_config.yaml"
"""The name that torchtune's metric loggers give it, which replace it by the one that they are given."""


@dataclass
class Record:
    """What is known about a run, on rank 0. A file that cannot be written does not end the run."""

    cfg: DictConfig
    kind: str
    """The name of the recipe's kind."""
    ranks: int
    logger: Any
    """torchtune's metric logger."""
    origin: Origin = field(default_factory=Origin)
    """The command that it was started with."""
    began: datetime = field(default_factory=datetime.now)
    made_of: dict[str, str] = field(default_factory=dict)
    """What the run is made of (device, model, data), by name, as far as it has been made."""
    resumed_from: str | None = None
    """The checkpoint of a resumed run, and its step."""
    attempts: Attempts | None = None
    search: Report | None = None
    trained: Trained | None = None
    """The outcome of training, if it was begun."""
    error: BaseException | None = None
    """The error that ended the run early."""
    _is_running: bool = True
    _config_is_logged: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.cfg.output_dir)

    # --- what the run is made of ----------------------------------------------------------------------

    def save_config(self) -> Path:
        """Write the config as it is given, unless an earlier run's is there: this one may not begin, as
        where that one is finished. Where it is, for messages."""
        path = self.folder / CONFIG_NAME
        if path.is_file() and not path.is_symlink():  # through which another file would be written
            return path
        with not_essential("The config"), durable.atomically(path, flush=False) as temporary:
            OmegaConf.save(self.cfg, temporary)
        return path

    def resumed(self, source: str, step: int, kept: Mapping[str, Any]) -> None:
        """The checkpoint that a run goes on from, and the values that it has and not the config."""
        self.resumed_from = f"{source} at step {step:,}"
        self.cfg = deepcopy(self.cfg)  # the run still works with its own
        for key, value in kept.items():
            block, _, name = key.rpartition(".")
            if value is None:
                OmegaConf.select(self.cfg, block).pop(name, None)
                continue
            if isinstance(value, str) and value.startswith("["):
                value = OmegaConf.create(value)  # lists are compared as text
            OmegaConf.update(self.cfg, key, value, force_add=True)

    def decided(self, batch: Split, step: int, report: Report | None) -> None:
        """The batch that training starts with, and the search that found it, if there was one."""
        self.search = report
        self.cfg = deepcopy(self.cfg)  # the run still works with its own
        if report is not None:
            self.cfg = report.applied_to(self.cfg)
            found = report.numbers()
            OmegaConf.update(self.cfg, FOUND, found, force_add=True)
            self.logger.log_dict(
                {f"search/{key}": value for key, value in found.items()}, step=step
            )
        if not KINDS[self.kind].generates:  # there it is prompts
            self.cfg.batch_size = batch.micro_batch
        self.cfg.gradient_accumulation_steps = batch.accumulation
        self._log_config()
        if report is not None:
            self.write()

    def _log_config(self) -> None:
        """Log the config, once: W&B refuses values that change."""
        if not self._config_is_logged:
            self._config_is_logged = True
            self.logger.log_config(self.cfg)

    # --- the report -----------------------------------------------------------------------------------

    def close(self, error: BaseException | None, trained: Trained | None = None) -> None:
        """Write the report and the plot at the end of a run, whatever ended it."""
        self.error, self.trained, self._is_running = error, trained, False
        has_begun = self.search is not None or trained is not None
        if not has_begun and (self.folder / REPORT_NAME).is_file():
            return  # that of an earlier run, of which this one has changed nothing
        self._log_config()
        if trained is not None and trained.may_change and trained.history is not None:
            with not_essential("The plot of the run"):
                if figure := curves.figure(trained.history):
                    plots.save(figure, self.folder / curves.PLOT_NAME)
        if path := self.write():
            log.info(f"Report: {path}. Everything else: {self.folder}")

    def write(self) -> Path | None:
        """Write the report; where it is, or None."""
        path = self.folder / REPORT_NAME
        try:
            html = self.html()
        except Exception as problem:  # whatever it is, it is not worth a run
            log.warning(
                f"The report of the run could not be made: {problem!r}. Please report this."
            )
            return None
        with not_essential("The report of the run"):
            with durable.atomically(path, flush=False) as temporary:
                temporary.write_text(html)
            return path
        return None

    def html(self) -> str:
        config = OmegaConf.to_yaml(shown_config(self.cfg), sort_keys=True)
        sections: dict[str, list[Block]] = {
            "Summary": self._summary(),
            "Command, model and data": [self._made_of()],
            "Search": self._search(),
            "Training and memory": [self._training()],
            "Events": [_events(self.folder / EVENTS_NAME)],
            "Config": [*self._differences(), Verbatim(config, "All of it, as trained with")],
        }
        return as_page(f"Run {self.folder.name} ({self.kind})", sections)

    def _summary(self) -> list[Block]:
        error, trained = self.error, self.trained
        state = "running" if self._is_running else "finished"
        if error is not None:
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        facts = {
            "state": state,
            "began": f"{self.began:%Y-%m-%d %H:%M:%S}",
            "written": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "output": str(self.folder.absolute()),
        }
        if self.resumed_from is not None:
            facts["resumed from"] = self.resumed_from
        if self.attempts is not None and self.attempts.before is not None:
            again = counted(self.attempts.now.again, "step")
            facts["attempts"] = f"{self.attempts.now.number}; {again} trained again in all"
        if trained is not None:
            split = trained.split
            samples = counted(split.global_batch, trained.sample)
            facts["global batch"] = f"{samples} ({split.text()})"
            facts["steps"] = f"{trained.steps:,}"
            facts["retried steps"] = f"{trained.retried_steps:,}"
        if trained is not None and (summary := trained.summary) is not None:
            part, run, ranks = summary.part, summary.run, counted(self.ranks, "rank")
            if run is not None:
                facts["time"] = duration(run.seconds)
                averaged = run.averaged()
                facts |= {name: f"{change} ({averaged})" for name, change in run.changes().items()}
                if run.spent:
                    facts["time by phase"] = shares(run.spent)
            if summary.begun_at:
                first, last = summary.begun_at + 1, summary.begun_at + part.steps
                facts["since it was resumed"] = f"steps {first:,} to {last:,}: {part.text()}"
            since = " since it was resumed" if summary.begun_at else ""
            speed = f"{summary.tokens_per_second:,.0f} tokens/s over {ranks}"
            facts[f"speed{since}"] = speed
            if summary.capacity is not None:
                facts[f"peak memory{since}"] = bytes_of(summary.peak_bytes, summary.capacity)
            if summary.next_time:
                facts["next time, as memory ran out"] = summary.next_time
        why = [] if error is None else [Verbatim(_reason(error), failed=True)]
        return [*why, Table("", ("", ""), list(facts.items()))]

    def _made_of(self) -> Block:
        """What was run on what, and where to find what it has written."""
        facts = {"command": self.origin.command} if self.origin.command else {}
        facts |= {"versions": versions(), "ranks": f"{self.ranks}", **self.made_of}
        checkpoints = OmegaConf.select(self.cfg, "checkpointer.output_dir")
        if checkpoints is not None:
            facts["checkpoints"] = f"{checkpoints} (newest: {last_saved(Path(checkpoints))})"
        return Table("", ("", ""), list(facts.items()))

    def _differences(self) -> list[Block]:
        """The config as what has changed since it was written."""
        found, name = self.origin.differences(self.cfg), self.origin.config_name
        if found is None:
            return []
        if not found:
            return [Paragraph([f"As in {name}."])]
        return [Table(f"What is not as in {name}", ("key", "there", "in this run"), found)]

    def _training(self) -> Block:
        if self.trained is None or self.trained.history is None:
            return Paragraph(["No step has been trained."])
        return Gallery(curves.figures(self.trained.history))

    def _search(self) -> list[Block]:
        if self.search is None:
            whose = (
                "as configured" if self.resumed_from is None else "as before the run was resumed"
            )
            return [Paragraph([f"There was no search: batch_size is {whose}."])]
        blocks = self.search.blocks()
        if overrides := self.search.overrides():
            blocks.append(Listing(self.search.use_of_overrides, [overrides]))
        return blocks


def _events(path: Path) -> Block:
    if not path.is_file():
        return Paragraph(["Nothing changed the batch in training."])
    rows = []
    for line in path.read_text().splitlines()[-_MOST_EVENTS:]:
        with suppress(ValueError):  # a run that was killed has left a part of a line
            event = json.loads(line)
            step, reason = str(event.pop("step")), event.pop("reason")
            changes = event.pop("changes", [])
            changes += [f"{key.replace('_', ' ')} {_change(what)}" for key, what in event.items()]
            rows.append((step, reason, "; ".join(changes)))
    return Table("", ("step", "reason", "change"), rows)


def _change(what: Any) -> str:
    return " -> ".join(map(str, what)) if isinstance(what, list) else str(what)


def _reason(error: BaseException) -> str:
    if isinstance(error, (AdaptiveBatchingError, KeyboardInterrupt)):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))
