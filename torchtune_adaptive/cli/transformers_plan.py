"""``plan --hf MODEL``: a trainer of transformers or TRL, by settings in its own words."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import yaml

from torchtune_adaptive.cli.asked_program import AskedProgram
from torchtune_adaptive.cli.hub import GivenModel, require_config
from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.planner import gpus

METHODS = ("full", "lora", "qlora")
DEFAULT = "SFTTrainer"
_ROWS = "per_device_train_batch_size"
_GIVEN_BY_OPTIONS = ("folder", "trainer", "ranks")
_STRINGS = ("optim", "dtype")
"""Settings whose values YAML may take for something else."""


def asked_trainer(
    arguments: argparse.Namespace, model: GivenModel, gpu: gpus.Gpu, ranks: int, **others: Any
) -> AskedProgram:
    """The trainer that options describe; ``others`` are of its program.

    Raises:
        ConfigError: an option or a setting cannot work.
        NoPrediction: a package is not installed.
    """
    from torchtune_adaptive.library import TransformersStep

    require_config(model.folder)
    trainer, method = arguments.trainer or DEFAULT, arguments.method or METHODS[0]
    settings = _settings(arguments.words)
    if arguments.seq_len:
        generates = trainer in ("GRPOTrainer", "RLOOTrainer")
        settings["max_prompt_length" if generates else "max_length"] = arguments.seq_len
    if arguments.rows is not None:
        settings[_ROWS] = arguments.rows
    if method != "full":
        settings["lora"] = True
    if method == "qlora":
        settings["load_in_4bit"] = True
    step = TransformersStep(folder=str(model.folder), trainer=trainer, ranks=ranks, **settings)
    options = [("--trainer", arguments.trainer), ("--method", arguments.method)]
    typed = [word for name, value in options if value for word in (name, value)]
    kept = [word for word in arguments.words if not word.startswith((f"{_ROWS}=", "max_length="))]
    return AskedProgram(
        step.program(gpu, **others),
        ("--hf", model.given, *typed, *kept),
        rows_key=_ROWS,
        settings=step.settings,
        about=model.about,
    )


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """The settings that ``key=value`` gives; the names of a list are separated by commas."""
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key in _GIVEN_BY_OPTIONS:
            reason = "is said by an option" if equals else "is not an override"
            raise ConfigError("KEY=VALUE", word, reason, "Write key=value, with a trainer's key")
        if "," in value and "{" not in value and "[" not in value:
            settings[key] = value.split(",")
        else:
            settings[key] = value if key in _STRINGS else yaml.safe_load(value)
    return settings
