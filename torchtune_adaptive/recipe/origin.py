"""What a run was made of: its command, its config as it is written, versions, model and data."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import ConfigError, counted, launcher, libraries
from torchtune_adaptive.recipe.registry import load_config, name_of_config
from torchtune_adaptive.recipe.settings.keys import FOUND
from torchtune_adaptive.recipe.settings.secrets import shown, shown_config

_MODELS = ("model", "policy_model", "reward_and_value_model")
"""The keys of models that are trained."""
_DATA_KEYS = ("source", "data_files", "name", "split")
"""The keys of a dataset that say which data it is."""


@dataclass(frozen=True)
class Origin:
    """The command that a run was started with, as far as it is known: a recipe can be called without one."""

    command: str = ""
    config_name: str = ""
    """The name of the config, or its path."""
    config: DictConfig | None = None
    """The config as it is written, before the command changed it."""

    @classmethod
    def of(cls, arguments: Sequence[str], recipe: str) -> Origin:
        """That of a process with these arguments (``sys.argv``), which runs a recipe of this name."""
        program, *given = arguments
        if "--config" not in given[:-1]:
            return cls()
        at = given.index("--config")
        path, overrides = given[at + 1], given[:at] + given[at + 2 :]
        name = name_of_config(Path(path)) or path
        started = recipe if Path(program).stem == recipe else program
        given = [
            f"{key}{eq}{shown(key, to)}" for key, eq, to in (o.partition("=") for o in overrides)
        ]
        words = ["tune", "run", *_launched(), started, "--config", name, *given]
        config = None
        with suppress(ConfigError):  # the file is gone
            config = load_config(path)
        return cls(shlex.join(words), name, config)

    def differences(self, cfg: DictConfig) -> list[tuple[str, str, str]] | None:
        """The keys whose values in another config are not those written, with both; None if they are not
        known. What a search has found is none of them."""
        if self.config is None:
            return None
        written, now = (dict(_values(each)) for each in (self.config, cfg))
        return [
            (key, shown(key, written.get(key, "-")), shown(key, now.get(key, "-")))
            for key in dict.fromkeys([*written, *now])
            if written.get(key) != now.get(key)
        ]


def _launched() -> list[str]:
    """The options of a launcher that started as many processes as there are."""
    if not launcher.has_started_this():
        return []
    here = launcher.local_size()
    machines = launcher.size() // here
    nodes = ["--nnodes", str(machines)] if machines > 1 else []
    return [*nodes, "--nproc_per_node", str(here)]


def _values(cfg: DictConfig) -> Iterator[tuple[str, str]]:
    """The values of a config as they are written: what refers to another key has not changed with it."""
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    plain.pop(FOUND, None)
    yield from _flat(plain, "")


def _flat(block: dict[str, Any], above: str) -> Iterator[tuple[str, str]]:
    for key, value in block.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", "null" if value is None else str(value)


def versions() -> str:
    """The versions of everything that decides how a run behaves."""
    found = {**libraries(), "Python": platform.python_version()}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def model_in_words(cfg: DictConfig, parameters: int, trained: int) -> str:
    """What a config trains, and how large it is."""
    names = [cfg[key].get("_component_") for key in _MODELS if cfg.get(key)]
    size = counted(parameters, "parameter")
    part = "" if trained == parameters else f", {trained:,} of them trained"
    return f"{' and '.join(names)}: {size}{part}"


def data_in_words(cfg: DictConfig, samples: int, sample: str) -> str:
    """The data of a config, and how much there is."""
    plain: Any = OmegaConf.to_container(shown_config(cfg))
    blocks = plain["dataset"] if isinstance(plain["dataset"], list) else [plain["dataset"]]
    names = []
    for block in blocks:
        which = ", ".join(f"{key} {block[key]}" for key in _DATA_KEYS if block.get(key))
        names.append(f"{block.get('_component_')}{which and f' ({which})'}")
    return f"{'; '.join(names)}: {counted(samples, sample)}"
