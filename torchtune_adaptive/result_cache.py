"""Remember the sizes that searches found, under everything that could change them.

One small file for each result, named by a fingerprint of the facts, with the facts in it. Whatever is
wrong with a file, it is a result that is not remembered, never an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import AdaptiveSettings

log = logging.getLogger(__name__)

# The keys of a config that decide how much memory a step takes.
_CONFIG_KEYS = (
    "model",
    "loss",
    "optimizer",
    "optimizer_in_bwd",
    "clip_grad_norm",
    "dtype",
    "compile",
    "enable_activation_checkpointing",
    "ac_mode",
    "ac_option",
    "enable_activation_offloading",
    "custom_sharded_layers",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "collate_fn",
    "gradient_accumulation_steps",
    "batch_size",
)
_LIBRARIES = ("torch", "torchtune", "torchao", "torchtune-adaptive")
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def facts(
    cfg: DictConfig,
    settings: AdaptiveSettings,
    *,
    row_length: int,
    packed: bool,
    ranks: int,
    device: str,
    capacity: int,
) -> dict[str, Any]:
    """Everything that could change the result of a search.

    The capacity counts with two digits: it differs by a few pages from run to run, and a result is
    confirmed by a trial before it is used.
    """
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(resolved, dict)
    return {
        "config": {key: resolved.get(key) for key in _CONFIG_KEYS},
        "settings": {
            "rounding": settings.rounding,
            "ceiling": settings.ceiling,
            "headroom": settings.headroom,
            "memory_limit": settings.memory_limit,
            "keep_global_batch": settings.keep_global_batch,
        },
        "row_length": row_length,
        "packed": packed,
        "ranks": ranks,
        "device": device,
        "capacity": float(f"{capacity:.2g}"),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "allocator": {name: os.environ.get(name) for name in _ALLOCATOR_VARIABLES},
    }


def cache_folder(cache: bool | str) -> Path | None:
    """Where the setting says that things are remembered, if they are."""
    if cache is False:
        return None
    if cache is True:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "torchtune_adaptive"
    return Path(cache).expanduser()


class ResultCache:
    """Found sizes in a folder; without one, nothing is ever remembered."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def from_setting(cls, cache: bool | str) -> ResultCache:
        folder = cache_folder(cache)
        return cls(folder / "batch_sizes" if cache is True and folder else folder)

    def get(self, facts: Mapping[str, Any]) -> int | None:
        """The size that was found under exactly these facts."""
        path = self._path(facts)
        if path is None or not path.exists():
            return None
        try:
            entry = json.loads(path.read_text())
            size = entry["size"]
            if entry["facts"] != _plain(facts) or not isinstance(size, int) or size < 1:
                raise ValueError("it is about something else")
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning(f"Not using the remembered batch size in {path}: {error}. Searching anew.")
            return None
        return size

    def put(self, facts: Mapping[str, Any], size: int) -> None:
        """Remember a size; whole or not at all, so that two jobs at once do no harm."""
        path = self._path(facts)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump({"size": size, "facts": _plain(facts)}, file, indent=1)
            os.replace(file.name, path)
        except OSError as error:
            log.warning(f"The batch size that was found is not remembered: {error}.")

    def _path(self, facts: Mapping[str, Any]) -> Path | None:
        if self._folder is None:
            return None
        text = json.dumps(_plain(facts), sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _plain(facts: Mapping[str, Any]) -> Any:
    """As JSON gives it back, so that what was written equals what is read."""
    return json.loads(json.dumps(facts, default=str))
