"""All private interfaces that the command line needs, as there is no public way."""

from __future__ import annotations

import argparse
import atexit
from importlib import import_module
from typing import Any


def torchtune_command(name: str, kind: str) -> Any:
    """The class of one of torchtune's commands, without the imports of the others (torchtune 0.6.1)."""
    return getattr(import_module(f"torchtune._cli.{name}"), kind)


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a parser (Python 3.11)."""
    return parser._actions


def run_exit_functions() -> None:
    """Call what is registered to run when Python ends, and forget it (Python 3.11)."""
    atexit._run_exitfuncs()


def end_ranks_within(seconds: float) -> None:
    """Let torchrun kill ranks that do not end, when another one has failed, after so many seconds.

    It waits 30 seconds for those that it has forked, whatever ``--shutdown-timeout`` says (torch 2.13).
    """
    from torch.multiprocessing import ProcessContext

    wait = ProcessContext._join_procs_with_timeout

    def wait_no_longer(ranks: Any, timeout: float) -> None:
        wait(ranks, min(timeout, seconds))

    ProcessContext._join_procs_with_timeout = wait_no_longer  # type: ignore[assignment,method-assign]
