"""The program of each rank of a run: it runs a recipe as ``python`` would, whether this process was forked or
started anew.

    python -m torchtune_adaptive.cli.forked_rank ENVIRONMENT RECIPE [ARGUMENT ...]

``ENVIRONMENT`` is JSON: variables to set. ``RECIPE`` is what ``run_recipe`` takes.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback

from torchtune_adaptive.cli import private

ASKED_TO_STOP = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torchrun passes on to ranks; the server that they are forked from does not listen to them."""


def main() -> None:
    environment, recipe, *arguments = sys.argv[1:]
    os.environ.update(json.loads(environment))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED_TO_STOP)
    status = _status_of(recipe, arguments)
    # multiprocessing ends what it forked without them, before Python 3.13.
    private.run_exit_functions()
    if status:
        sys.exit(status)


def _status_of(recipe: str, arguments: list[str]) -> int:
    """Run a recipe; the status that Python would end with."""
    try:
        run_recipe(recipe, arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        return 128 + signal.SIGINT
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def run_recipe(recipe: str, arguments: list[str]) -> None:
    """Run a recipe in this process: a file, by its absolute path, or a module."""
    sys.argv = [recipe, *arguments]
    if os.path.isabs(recipe):
        runpy.run_path(recipe, run_name="__main__")
    else:
        runpy.run_module(recipe, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
