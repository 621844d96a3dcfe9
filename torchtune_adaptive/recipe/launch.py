"""Wraps a recipe's main: resolves the config's name and tells why a run ends."""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config

from torchtune_adaptive.common import AdaptiveBatchingError, ConfigError, Stopped, ending, launcher
from torchtune_adaptive.recipe.registry import find_config, load_config, with_overrides
from torchtune_adaptive.recipe.train.stop import exit_status


def recipe(run: Callable[[DictConfig], None], description: str | None = None) -> Callable[[], None]:
    """Make a recipe's main function out of one that takes a config; ``--help`` shows the description.

    Like torchtune's ``config.parse``, but ``--config`` also takes the names of our configs, the values of
    overrides may contain ``=``, ``--quiet`` leaves only warnings and errors, and what ends the run is said
    last and once: in one line where we raise it on purpose, else with its traceback. A crash in native code
    prints where each thread was.
    """

    def described(cfg: DictConfig) -> None:
        gc.freeze()  # what was imported stays: each trial would look at it, which takes a quarter of a second
        run(cfg)

    described.__doc__ = description or run.__doc__
    parse_and_run = config.parse(described)

    @functools.wraps(run)
    def main() -> None:
        if sys.__stderr__ is not None and not faulthandler.is_enabled():
            faulthandler.enable(sys.__stderr__)
        try:
            sys.argv[1:] = _arguments(sys.argv[1:])
            parse_and_run()
        except AdaptiveBatchingError as error:
            reason = f"{type(error).__name__}: {error}"
            ending.explain(reason, known_to_all=error.everywhere, repeats=error.repeats)
            _leave_others(error.everywhere)
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.exit(1)
        except KeyboardInterrupt as interrupt:
            _end_interrupted(interrupt)
        except Exception as error:
            ending.explain_bug(error)
            _leave_others(known_to_all=False)
            sys.exit(1)

    return main


def _leave_others(known_to_all: bool) -> None:
    """End here, where there are other ranks and not all of them end for the same reason."""
    if not known_to_all and dist.is_initialized() and dist.get_world_size() > 1:
        ending.leave(1)


def _arguments(given: list[str]) -> list[str]:
    """The arguments of a recipe as torchtune's parser expects them.

    The parser would end in a traceback where the config or an override cannot be read, so both are tried.
    """
    arguments, given = [], list(given)
    name, overrides = "", []
    while given:
        argument = given.pop(0)
        option, _, value = argument.partition("=")
        if option == "--config" and (value or given):
            name = value or given.pop(0)
            load_config(name)
            arguments += ["--config", str(find_config(name))]
        elif argument in ("-q", "--quiet"):
            logging.getLogger("torchtune_adaptive").setLevel(logging.WARNING)
        elif argument in ("-h", "--help", "--config"):
            arguments.append(argument)
        elif argument.startswith("-"):
            raise _no_option(option, value or (given[0] if given else "VALUE"))
        else:
            overrides.append(argument if argument.startswith("~") else _override(argument))
    if name:
        with_overrides(load_config(name), overrides)
    return arguments + overrides


def _no_option(option: str, value: str) -> ConfigError:
    key = option.lstrip("-").replace("-", "_")
    return ConfigError(
        option, value, "is not an option of a recipe", f"What a config has is written {key}={value}"
    )


def _override(argument: str) -> str:
    """``KEY=VALUE`` without a further ``=``, at which torchtune's parser stops: as JSON, with escapes."""
    key, equals, value = argument.partition("=")
    if not key or not equals:
        raise ConfigError("KEY=VALUE", argument, "is not an override", "Write key=value")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        assert isinstance(parsed, dict)
        as_json = json.dumps(parsed["value"]).replace("=", r"\u003d")
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        reason = f"is not YAML ({str(error).splitlines()[0]})"
        raise ConfigError(key, value, reason, "Quote the value, in the shell as well") from error
    except TypeError as error:
        reason = f"is of a type that no key takes ({error})"
        raise ConfigError(
            key, value, reason, "Write a text, a number, a list or a block"
        ) from error
    return f"{key}={as_json}" if "=" in value else argument


def _end_interrupted(interrupt: KeyboardInterrupt) -> None:
    """End by SIGTERM or Ctrl-C, with the status that a shell would report.

    Nothing is torn down: other ranks may be gone, or wait for this one.
    """
    if not isinstance(interrupt, Stopped):
        what = "stopped by Ctrl-C while not training, so there is nothing to save."
        interrupt = Stopped(what, exit_status(signal.SIGINT))
    rank = launcher.rank()
    if (rank == 0 or not interrupt.everywhere) and not ending.another_rank_has_failed():
        ending.say(f"\nrank {rank}: {interrupt}\n")
        ending.note(str(interrupt))
    with suppress(OSError):  # nobody may read it any more
        sys.stdout.flush()
    os._exit(interrupt.status)
