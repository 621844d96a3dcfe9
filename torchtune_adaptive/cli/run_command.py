"""``tune-adaptive run``: torchrun, with ranks that are forked from a server.

It has imported what they need, so a restart takes no imports. With ``--elastic`` each attempt is on the GPUs
that work.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as multiprocessing_of_torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import determine_local_world_size, get_args_parser
from torch.distributed.run import run as torchrun

from torchtune_adaptive.cli import forked_rank, private
from torchtune_adaptive.cli.elastic import FAILURES, Devices, bounds
from torchtune_adaptive.cli.recipe_argument import config_of
from torchtune_adaptive.common import ConfigError, ending, launcher
from torchtune_adaptive.core import before_fork
from torchtune_adaptive.recipe import file_of_recipe, find_config, runs_on_ranks, stop_if_shadowed

_PRELOADED = "torchtune_adaptive.cli.preloaded"
_FORKED, _ANEW = "forkserver", "spawn"
"""Of torchrun's ``--start-method``: forked from a server, or by ``python``, as torchrun itself does."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SAFE = "PYTHONSAFEPATH"
_ONE_MACHINE = ("1", "1:1")
"""Of torchrun's ``--nnodes``."""
_MOMENT = 120.0
"""Seconds that a GPU has to say that it works."""


def run(argv: list[str]) -> None:
    """Run a recipe: on ranks if there are options before its name, or else in this process."""
    parser = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        sys.exit(2)
    asked = parser.parse_args(argv)
    name, arguments = asked.training_script, asked.training_script_args
    if not any(each.partition("=")[0] == "--config" for each in arguments):
        parser.error("The '--config' argument is required.")
    arguments = [*map(_with_file, ["", *arguments], arguments)]
    # One of the user's own is a module, by its path from here.
    recipe = file_of_recipe(name) or os.path.splitext(name)[0].replace("/", ".")
    sys.path.append(os.getcwd())
    if len(argv) == 1 + len(arguments):
        forked_rank.run_recipe(recipe, arguments)
    elif asked.max_restarts < 0:
        raise ConfigError("--max-restarts", asked.max_restarts, "is less than 0", "Give 0 or more")
    elif not runs_on_ranks(name):
        parser.error(
            f"Recipe {name} does not run on several ranks. Leave out what stands before its name."
        )
    elif asked.elastic:
        _run_elastic(asked, recipe, arguments)
    elif ":" in asked.nproc_per_node:
        reason = "is a range, which is for --elastic"
        raise ConfigError("--nproc_per_node", asked.nproc_per_node, reason, "Add --elastic")
    else:
        _choose_start_method(asked, _ranks(asked.nproc_per_node))
        _launch(asked, recipe, arguments)


def _parser() -> argparse.ArgumentParser:
    """torchrun's parser, for recipes."""
    parser = get_args_parser()
    parser.prog = "tune-adaptive run"
    parser.usage = (
        "tune-adaptive run [TORCHRUN-OPTIONS] <recipe> --config <config> [RECIPE-OPTIONS]"
    )
    parser.description = "Run a recipe; on several ranks, with all options of torchrun."
    parser.set_defaults(start_method=_FORKED)
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="Start each attempt on the GPUs that work; --nproc_per_node MIN:MAX says how many. A GPU whose "
        f"rank is the first to fail or to be lost, {FAILURES} times in a row, is left out.",
    )
    for action in private.actions(parser):
        if action.dest == "training_script":
            action.metavar, action.help = (
                "recipe",
                "Name of a recipe (see `tune-adaptive ls`), or a file.",
            )
        elif action.dest == "training_script_args":
            action.metavar, action.help = "...", "What the recipe is given."
    return parser


def _with_file(before: str, argument: str) -> str:
    """An argument of a recipe, with the file of a config for its name, if there is one."""
    option, _, value = argument.partition("=")
    with suppress(ConfigError):
        if before == "--config":
            return str(find_config(argument))
        if option == "--config" and value:
            return f"--config={find_config(value)}"
    return argument


def _ranks(given: str) -> int:
    """The ranks on this machine, of a number or a word that torchrun takes.

    Raises:
        ConfigError: it is neither.
    """
    remedy = "Give a number, or gpu, cpu or auto"
    try:
        ranks = determine_local_world_size(given)
    except ValueError as error:
        raise ConfigError(
            "--nproc_per_node", given, f"is no number of ranks here ({error})", remedy
        ) from None
    if ranks < 1:
        raise ConfigError("--nproc_per_node", given, "is less than 1", remedy)
    return ranks


def _choose_start_method(asked: argparse.Namespace, ranks: int) -> None:
    """Start the server that ranks are forked from; or see that they are started anew, if that cannot work."""
    stop_if_shadowed()
    if asked.start_method != _FORKED:
        return
    timeout = getattr(asked, "shutdown_timeout", None)  # torch 2.11 does not have it
    if timeout is not None:
        private.end_ranks_within(timeout)
    if ranks > 1:
        # As torchrun does, but before the server reads it.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONUNBUFFERED"] = "1"  # as torchrun starts ranks
    multiprocessing.set_forkserver_preload([_PRELOADED])
    check = _context(asked).Process(target=_require_forked)
    is_ours = os.environ.setdefault(_SAFE, _PRELOADED) == _PRELOADED
    try:
        check.start()
        if _all_done([check]):
            return
    except (OSError, EOFError):
        pass  # the server has ended, and said why
    finally:
        if is_ours:
            del os.environ[_SAFE]
    asked.start_method = _ANEW
    _say(
        "ranks cannot be forked here (see above), so each imports what it needs, as with `tune run`"
    )


def _context(asked: argparse.Namespace) -> Any:
    return multiprocessing.get_context(asked.start_method)


def _require_forked() -> None:
    """End with an error where a rank could not be forked from the same server."""
    preloaded = sys.modules[_PRELOADED]
    assert not preloaded.THREADS, f"imports have started threads: {preloaded.THREADS}"
    before_fork.require_accelerator()


def _all_done(processes: Sequence[BaseProcess]) -> bool:
    """Whether these processes end without an error, in time."""
    end = time.monotonic() + _MOMENT
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    done = all(process.exitcode == 0 for process in processes)
    for process in processes:
        process.kill()
    return done


@record
def _launch(
    asked: argparse.Namespace,
    recipe: str,
    arguments: list[str],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Let torchrun start a recipe on ranks, which have these variables as well.

    Raises:
        ChildFailedError: a rank has failed, and is not started again.
    """
    forked = asked.start_method == _FORKED
    program = forked_rank.__file__ if forked else forked_rank.__name__
    asked = copy(asked)
    asked.run_path, asked.module, asked.no_python = forked, not forked, False
    # As `tune run` does, but not where machines are to meet at --master_addr.
    on_one_machine = asked.nnodes in _ONE_MACHINE
    asked.standalone = asked.standalone or (on_one_machine and not asked.rdzv_endpoint)
    asked.training_script = program
    logging.getLogger(multiprocessing_of_torch.__name__).addFilter(_without_traceback)
    asked.training_script_args = [json.dumps(environment or {}), recipe, *arguments]
    try:
        torchrun(asked)
    except SignalException as stopped:  # the ranks have said what they did
        sys.exit(128 + stopped.sigval)


def _without_traceback(line: logging.LogRecord) -> bool:
    """Log a rank's failure without a traceback of the launcher, as torchrun does where it forks no ranks."""
    line.exc_info = None
    return True


def _run_elastic(asked: argparse.Namespace, recipe: str, arguments: list[str]) -> None:
    """Launch a recipe on the GPUs of this machine that work, again and again until it is done.

    Each attempt is a launch of its own, as torchrun's attempts all have the same ranks.

    Raises:
        ChildFailedError: a rank has failed in the last attempt, or would fail in the same way again.
        ConfigError: too few GPUs work, or the options do not fit together.
    """
    if asked.nnodes not in _ONE_MACHINE:
        remedy = "Several machines are elastic with --nnodes MIN:MAX alone"
        raise ConfigError("--nnodes", asked.nnodes, "does not go with --elastic", remedy)
    least, most = bounds(asked.nproc_per_node)
    cfg = config_of(arguments)
    on_gpus = cfg.get("device") == "cuda"
    devices = Devices(_names(_ranks(most), on_gpus), least)
    wanted = {"resume_from_checkpoint": "True", "save_every_n_steps": "100"}
    if lacking := [f"{key}={value}" for key, value in wanted.items() if not cfg.get(key)]:
        _say(
            f"--elastic: each attempt trains again what the last one did, without {' '.join(lacking)}"
        )
    _choose_start_method(asked, len(devices.names))
    launch = secrets.token_hex(8)
    for attempt in range(asked.max_restarts + 1):
        chosen = devices.chosen(_working(devices.names, asked) if on_gpus else devices.names)
        each = copy(asked)
        each.nproc_per_node, each.max_restarts = str(len(chosen)), 0
        environment = {
            launcher.LAUNCH: launch,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(asked.max_restarts),
        }
        if on_gpus:
            environment[_VISIBLE] = ",".join(chosen)
        try:
            return _launch(each, recipe, arguments, environment)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if attempt == asked.max_restarts or ending.would_repeat(failure.error_file):
                raise
            # A reason that we give is one of the whole run, or names another rank.
            reason = given_reason(error)
            bad = rank if reason is None else ending.named_rank(reason)
            if bad is not None and devices.failed(chosen[bad]):
                why = f"its rank was the first to fail, or to be lost, {FAILURES} times in a row"
                _say(f"GPU {chosen[bad]} is left out, as {why}")


def _names(count: int, on_gpus: bool) -> list[str]:
    """The first GPUs that can be seen, as CUDA names them, or numbers."""
    visible = os.environ.get(_VISIBLE)
    if on_gpus and visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()][:count]
    return [str(number) for number in range(count)]


def _working(names: Sequence[str], asked: argparse.Namespace) -> list[str]:
    """Those of some GPUs on which a process can compute."""
    context = _context(asked)
    trials = [context.Process(target=_use, args=(name,)) for name in names]
    for trial in trials:
        trial.start()
    _all_done(trials)
    working = [name for name, trial in zip(names, trials, strict=True) if trial.exitcode == 0]
    if failing := [name for name in names if name not in working]:
        _say(f"left out, because a process cannot use it: GPU {', '.join(failing)}")
    return working


def _use(name: str) -> None:
    """Compute something on a GPU."""
    os.environ[_VISIBLE] = name
    before_fork.require_accelerator()


def given_reason(error: ChildFailedError) -> str | None:
    """Why the ranks of a run have ended, if the first to fail gave a reason without a traceback."""
    rank, failure = error.get_first_failure()
    said: Any = failure.message
    if not isinstance(said, dict) or "py_callstack" in said.get("extraInfo", {}):
        return None
    return f"rank {rank}: {said['message']}"


def _say(what: str) -> None:
    print(f"tune-adaptive: {what}.", file=sys.stderr, flush=True)
