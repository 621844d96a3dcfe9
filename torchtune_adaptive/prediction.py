"""A prediction for a run that is about to search: made beside it, in a process that sees no GPU.

Whatever goes wrong with it, the search goes on without it, and says so.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import BLOCK, AdaptiveSettings

log = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds that a prediction may take, from its start."""

# Of a launched process; a prediction is no rank of the run, and must not look like one.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Prediction:
    """The largest micro-batch that should fit, as ``tune-adaptive plan`` would say.

    Args:
        cfg: the config of the run.
        settings: how it searches.
        row_length: of the rows that it tries.
        ranks: how many there are.
        capacity: bytes that a rank can get.
    """

    def __init__(
        self,
        cfg: DictConfig,
        settings: AdaptiveSettings,
        *,
        row_length: int,
        ranks: int,
        capacity: int,
    ) -> None:
        self._deadline = time.monotonic() + PATIENCE
        self._folder = tempfile.TemporaryDirectory()
        config = Path(self._folder.name) / "config.yaml"
        config.write_text(OmegaConf.to_yaml(cfg, resolve=True))
        accumulates = settings.keep_global_batch or settings.grow_past_memory
        command = [
            *(sys.executable, "-c", "from torchtune_adaptive.cli import main; main()", "plan"),
            *("--config", str(config), "--nproc", str(ranks), "--memory", str(capacity)),
            *("--no-what-ifs", "--json", f"{BLOCK}.probe_length={row_length}"),
            *(["gradient_accumulation_steps=2"] if accumulates else []),
        ]
        environment = {k: v for k, v in os.environ.items() if k not in _LAUNCHED}
        self._process = subprocess.Popen(
            command,
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def size(self) -> int | None:
        """Wait for it; None if there is no answer."""
        try:
            left = max(0.0, self._deadline - time.monotonic())
            said, complaint = self._process.communicate(timeout=left)
            found = int(json.loads(said)["largest"])
        except subprocess.TimeoutExpired:
            log.info("No prediction: it took too long. Searching without it.")
            return None
        except (ValueError, KeyError, TypeError):
            reason = (complaint.strip().splitlines() or ["it said nothing"])[-1]
            log.info(f"No prediction: {reason} Searching without it.")
            return None
        finally:
            self.close()
        log.info(f"The largest micro-batch is predicted to be {found} rows.")
        return found

    def close(self) -> None:
        """Give it up, if it is still at it."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
