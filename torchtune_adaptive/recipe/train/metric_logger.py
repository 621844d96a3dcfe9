"""torchtune's metric logger, wrapped so that a failure to write does not end a run."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

from omegaconf import DictConfig
from torchtune import config

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.core import Ranks

log = logging.getLogger(__name__)


class MetricLogger:
    """A config's metric logger. It drops what it cannot write, and warns once.

    Args:
        cfg: the config.
        run: what tells this run from all others, so that W&B goes on with it when it is resumed.

    Raises:
        OSError: it cannot be opened for writing.
    """

    def __init__(self, cfg: DictConfig, run: str | None = None) -> None:
        self._has_failed = False
        goes_on: dict[str, Any] = {}
        if run is not None and cfg.metric_logger._component_.endswith("WandBLogger"):
            goes_on = {"id": run, "resume": "allow", "allow_val_change": True}
            goes_on = {key: goes_on[key] for key in goes_on.keys() - cfg.metric_logger.keys()}
        self._folder: str | None = cfg.metric_logger.get("log_dir")
        # torchtune's loggers print where they write.
        said = nullcontext() if log.isEnabledFor(logging.INFO) else redirect_stdout(StringIO())
        with said:
            self._logger: Any = config.instantiate(cfg.metric_logger, **goes_on)
        atexit.register(self.close)  # what it holds back is written, however the run ends

    @property
    def destination(self) -> str:
        """The file that metrics go to, or else who takes them, and the folder that it uses."""
        if (path := getattr(self._logger, "path_to_log_file", None)) is not None:
            return str(path())
        return ", ".join(filter(None, [type(self._logger).__name__, self._folder]))

    def log_config(self, cfg: DictConfig) -> None:
        self._write(self._logger.log_config, cfg)

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        self._write(self._logger.log_dict, payload, step=step)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._write(self._logger.close)

    def _write(self, write: Callable[..., None], *content: Any, **where: Any) -> None:
        try:
            write(*content, **where)
        except Exception as error:  # a service has its own
            if not self._has_failed:
                said = f"{type(error).__name__}: {error}"
                log.warning(f"Metrics are not written any more ({said}). The run continues.")
            self._has_failed = True


def start_metric_logger(
    cfg: DictConfig, ranks: Ranks, run: str | None = None
) -> MetricLogger | None:
    """The metric logger of a run, on rank 0; ``run`` tells it from all others.

    Raises:
        ConfigError: it cannot begin; on all ranks.
    """
    logger, problem = None, None
    if ranks.is_zero:
        try:
            logger = MetricLogger(cfg, run)
        except OSError as error:
            remedy = "Set metric_logger.log_dir to a folder that can be written to, or make room"
            problem = f"cannot write: {error}", remedy
        except Exception as error:  # a service has its own reasons: no package, no key, no network
            said = str(error).strip().rstrip(".")
            remedy = "Set it up, or use torchtune.training.metric_logging.DiskLogger"
            problem = f"cannot begin ({type(error).__name__}: {said})", remedy
    if problem := ranks.from_rank_zero(problem):
        refused = ConfigError("metric_logger", cfg.metric_logger._component_, *problem)
        refused.repeats = False  # a network may be back
        raise refused
    return logger
