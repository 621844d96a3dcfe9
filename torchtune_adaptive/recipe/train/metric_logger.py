"""torchtune's metric logger, for which a run does not end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

from omegaconf import DictConfig
from torchtune import config

log = logging.getLogger(__name__)


class MetricLogger:
    """A config's metric logger. What it cannot write any more is lost, and that is said once.

    Raises:
        OSError: it cannot even begin to write.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._has_failed = False
        # torchtune's loggers print where they write.
        said = nullcontext() if log.isEnabledFor(logging.INFO) else redirect_stdout(StringIO())
        with said:
            self._logger: Any = config.instantiate(cfg.metric_logger)

    def log_config(self, cfg: DictConfig) -> None:
        self._write(self._logger.log_config, cfg)

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        self._write(self._logger.log_dict, payload, step=step)

    def close(self) -> None:
        self._write(self._logger.close)

    def _write(self, write: Callable[..., None], *content: Any, **where: Any) -> None:
        try:
            write(*content, **where)
        except OSError as error:
            if not self._has_failed:
                log.warning(f"Metrics are not written any more: {error}. The run continues.")
            self._has_failed = True
