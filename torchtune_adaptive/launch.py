"""What is around a recipe: its config is found by name, and what goes wrong is said in one line."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable

import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import config

from torchtune_adaptive.errors import (
    AdaptiveBatchingError,
    CheckpointError,
    ConfigError,
    RankLost,
    Stopped,
)
from torchtune_adaptive.registry import find_config
from torchtune_adaptive.train.stop import exit_status


def recipe(run: Callable[[DictConfig], None]) -> Callable[[], None]:
    """Make a recipe's main function out of one that takes a config.

    As torchtune's ``config.parse``, with two things more: ``--config`` also takes the names of our
    configs, and an error that we raise on purpose is printed without a traceback.
    """
    parse_and_run = config.parse(run)

    @functools.wraps(run)
    def main() -> None:
        try:
            _find_config_by_name()
            parse_and_run()
        except AdaptiveBatchingError as error:
            _say(error)
            if dist.is_initialized() and not isinstance(error, RankLost):
                dist.destroy_process_group()
            sys.exit(1)
        except KeyboardInterrupt as interrupt:
            _end_interrupted(interrupt)

    return main


def _end_interrupted(interrupt: KeyboardInterrupt) -> None:
    """End by SIGTERM or Ctrl-C, with the status that a shell would report.

    Nothing is torn down: other ranks may be gone, or wait for this one.
    """
    if not isinstance(interrupt, Stopped):
        what = "stopped by Ctrl-C outside training, where there is nothing to save."
        interrupt = Stopped(what, exit_status(signal.SIGINT))
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not interrupt.everywhere:
        print(f"\nrank {rank}: {interrupt}\n", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(interrupt.status)


def _find_config_by_name() -> None:
    """Replace the name after ``--config`` with the path that torchtune's parser expects."""
    for index, argument in enumerate(sys.argv):
        if argument == "--config" and index + 1 < len(sys.argv):
            sys.argv[index + 1] = str(find_config(sys.argv[index + 1]))


def _say(error: AdaptiveBatchingError) -> None:
    rank = os.environ.get("RANK", "0")
    if isinstance(error, (ConfigError, CheckpointError)) and rank != "0":
        return  # all ranks have the same config, and agree on checkpoints
    name = type(error).__name__
    print(f"\nrank {rank}: {name}: {error}\n", file=sys.stderr, flush=True)
