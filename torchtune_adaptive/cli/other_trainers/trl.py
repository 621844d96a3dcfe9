"""Runs what a file of TRL's trains: ``-m`` and this module, the file, TRL's trainer, options of ``trl``.

A file does not say which of TRL's scripts it is for. Their parsers say which keys they have.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torchtune_adaptive.cli.private import actions
from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner import programs

_FIRST = ("sft", "dpo", "grpo")
"""Scripts that come before others where a file may be for several."""
_OF_ANY = {"env", "accelerate_config"}
"""Keys of files that are not of a script's parser."""


def main(path: str, trainer: str = "", *options: str) -> None:
    """Run the script of TRL for a file and a trainer, such as ``SFTTrainer``; empty if the file says."""
    from trl.cli.main import main as trl

    name = _script(yaml.safe_load(Path(path).read_text()), trainer.removesuffix("Trainer").lower())
    programs.note(f"trainer: the script of `trl {name}`; others by --trainer, e.g. DPOTrainer")
    sys.argv = ["trl", name, "--config", path, *options]
    raise SystemExit(trl())


def _script(given: Mapping[str, Any], asked: str) -> str:
    """The script that has the most keys of a file.

    Raises:
        NoPrediction: TRL has no such script, or none with such keys.
    """
    known = _keys_of_scripts()
    if asked and asked not in known:
        raise NoPrediction(
            f"--trainer: {asked}, but TRL has no script for it. It has {', '.join(known)}."
        )
    names = [asked] if asked else sorted(known, key=lambda name: name not in _FIRST)
    unknown = {name: sorted({*given} - known[name] - _OF_ANY) for name in names}
    best = min(names, key=lambda name: len(unknown[name]))
    if unknown[best]:
        raise NoPrediction(f"{', '.join(unknown[best])}: no keys of `trl {best}`. Leave them out.")
    return best


def _keys_of_scripts() -> dict[str, set[str]]:
    """The keys of each of TRL's scripts that train, those of the first ones first."""
    import trl.scripts

    others = [one.name for one in pkgutil.iter_modules(trl.scripts.__path__)]
    known = {}
    for name in dict.fromkeys((*_FIRST, *others)):
        module = importlib.import_module(f"trl.scripts.{name}")
        if hasattr(module, "make_parser"):
            keys = {action.dest for action in actions(module.make_parser())}
            if "output_dir" in keys:
                known[name] = keys
    return known


if __name__ == "__main__":
    main(*sys.argv[1:])
