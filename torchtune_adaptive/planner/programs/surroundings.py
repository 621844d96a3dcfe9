"""The surroundings of a program that only seems to train: what it writes is gone, and nobody hears of it."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchtune_adaptive.planner.programs.imports import WhenImported, put

_QUIET = {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "TQDM_DISABLE": "1",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Surroundings:
    """A folder that takes what a program writes, wherever it would, and that it then reads there."""

    def __init__(self) -> None:
        self._all = tempfile.mkdtemp(prefix="tune-adaptive-plan-")
        self._folder = os.path.join(self._all, "0")
        self._scratch = (self._all, os.path.realpath(tempfile.gettempdir()), "/dev/", "/proc/")

    def close(self) -> None:
        shutil.rmtree(self._all, ignore_errors=True)

    def forked(self) -> None:
        """This process is a fork, which goes on with what has been written, and writes for itself."""
        before, self._folder = self._folder, os.path.join(self._all, str(os.getpid()))
        if _lexists(before):
            shutil.copytree(before, self._folder, symlinks=True)

    def follow(self, imports: WhenImported) -> None:
        """Take from now on what the program writes, and let it reach nobody."""
        os.environ.update(_QUIET)
        for owner in (builtins, io):
            put(owner, "open", self._opening(io.open))
        put(os, "open", self._opening_descriptor(os.open))
        for name in ("mkdir", "rmdir", "remove", "unlink", "truncate", "chmod", "utime"):
            put(os, name, self._writing(getattr(os, name), 1))
        for name in ("rename", "replace", "link", "symlink"):
            put(os, name, self._writing(getattr(os, name), 2))
        for name in ("stat", "lstat", "listdir", "scandir", "access"):
            put(os, name, self._reading(getattr(os, name)))
        put(torch, "save", lambda *_, **__: None)
        connect = socket.socket.connect
        put(socket.socket, "connect", lambda one, address: _connected(connect, one, address))
        imports.call("datasets", lambda datasets: datasets.disable_caching())
        imports.call("safetensors.torch", lambda it: put(it, "save_file", lambda *_, **__: None))
        imports.call("transformers.integrations.integration_utils", _no_reports)
        imports.call("transformers.trainer", _no_hub)
        imports.call("accelerate.tracking", lambda it: put(it, "filter_trackers", lambda *_: []))

    def _where(self, path: Any, writes: bool) -> Any:
        """The place of a file: in the folder if it is written now, or was before."""
        try:
            whole = os.path.abspath(os.fsdecode(path))
        except TypeError:  # a descriptor
            return path
        if whole.startswith(self._scratch):
            return path
        ours = self._folder + whole
        if not writes:
            return ours if _lexists(ours) else path
        if not _lexists(ours):
            Path(ours).parent.mkdir(parents=True, exist_ok=True)
            if os.path.isfile(whole):  # to be changed, perhaps
                shutil.copyfile(whole, ours)
        return ours

    def _opening(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            writes = any(letter in mode for letter in "wax+")
            return before(self._where(file, writes), mode, *arguments, **options)

        return opened

    def _opening_descriptor(self, before: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            return before(self._where(path, bool(flags & _WRITES)), flags, *arguments, **options)

        return opened

    def _writing(self, before: Callable[..., Any], paths: int) -> Callable[..., Any]:
        def done(*arguments: Any, **options: Any) -> Any:
            placed = [self._where(path, writes=True) for path in arguments[:paths]]
            return before(*placed, *arguments[paths:], **options)

        return done

    def _reading(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def done(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            return before(self._where(path, writes=False), *arguments, **options)

        return done


_lexists = os.path.lexists


def _connected(connect: Callable[..., Any], one: socket.socket, address: Any) -> Any:
    host = address[0] if isinstance(address, tuple) else ""
    allowed = {each[4][0] for each in _hosts()}
    if host and not host.startswith("127.") and host not in ("localhost", "::1", *allowed):
        raise OSError(f"a plan does not connect to {host}")
    return connect(one, address)


def _hosts() -> list[Any]:
    """The addresses of the Hub, of which configs and tokenizers are read."""
    name = os.environ.get("HF_ENDPOINT", "https://huggingface.co").partition("://")[2]
    try:
        return socket.getaddrinfo(name.partition("/")[0].partition(":")[0], 443)
    except OSError:
        return []


def _no_reports(integrations: Any) -> None:
    put(integrations, "get_reporting_integration_callbacks", lambda *_: [])


def _no_hub(trainer: Any) -> None:
    put(trainer.Trainer, "init_hf_repo", lambda *_, **__: None)
    put(trainer.Trainer, "push_to_hub", lambda *_, **__: None)
    put(trainer.Trainer, "_save_checkpoint", lambda *_, **__: None)
    put(trainer.Trainer, "save_model", lambda *_, **__: None)
