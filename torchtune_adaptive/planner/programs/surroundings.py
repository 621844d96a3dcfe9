"""The surroundings of a program that only seems to train: what it writes is gone, and nobody hears of it."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from torchtune_adaptive.planner.programs.imports import WhenImported, put

_QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "TQDM_DISABLE": "1",
    "USE_HUB_KERNELS": "0",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Surroundings:
    """A folder that takes what a program writes, wherever it would, and that it then reads there."""

    def __init__(self) -> None:
        self._all = tempfile.mkdtemp(prefix="tune-adaptive-plan-")
        self._folder = os.path.join(self._all, "0")
        self._scratch = (self._all, "/dev/", "/proc/", "/sys/")
        self._read: set[str] = set()

    def close(self) -> None:
        shutil.rmtree(self._all, ignore_errors=True)

    def read(self) -> frozenset[str]:
        """The files that were read or looked for, modules among them."""
        sources = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
        return frozenset(self._read.union(str(path) for path in sources if path))

    def forked(self) -> None:
        """This process is a fork, which goes on with what has been written, and writes for itself."""
        before, self._folder = self._folder, os.path.join(self._all, str(os.getpid()))
        if _lexists(before):
            shutil.copytree(before, self._folder, symlinks=True)

    def follow(self, imports: WhenImported) -> None:
        """Take from now on what the program writes, and let it reach nobody."""
        os.environ.update(_QUIET)
        os.environ["TMPDIR"] = tempfile.tempdir = self._all
        for owner in (builtins, io):
            put(owner, "open", self._opening(io.open))
        put(os, "open", self._opening_descriptor(os.open))
        for name in ("mkdir", "truncate", "chmod", "utime"):
            put(os, name, self._writing(getattr(os, name), 1))
        for name in ("rename", "replace", "link"):
            put(os, name, self._writing(getattr(os, name), 2))
        put(os, "symlink", self._linking(os.symlink))
        for name in ("remove", "unlink", "rmdir"):
            put(os, name, self._removing(getattr(os, name)))
        for name in ("stat", "lstat", "access", "statvfs", "chdir"):
            put(os, name, self._reading(getattr(os, name)))
        put(os, "listdir", self._listing(os.listdir))
        put(os, "scandir", self._scanning(os.scandir))
        imports.call("pyarrow", self._of_arrow)
        imports.call("transformers.tokenization_utils_base", self._of_tokenizers)
        put(torch, "save", lambda *_, **__: None)
        connect = socket.socket.connect
        put(socket.socket, "connect", lambda one, address: _connected(connect, one, address))
        imports.call("datasets", lambda datasets: datasets.disable_caching())
        imports.call("safetensors.torch", lambda it: put(it, "save_file", lambda *_, **__: None))
        imports.call("transformers.training_args", _no_reports)
        imports.call("transformers.integrations.integration_utils", _no_callbacks)
        imports.call("wandb", lambda it: it.init())  # a run of nothing, which others may write to
        imports.call("transformers.trainer", _no_hub)
        imports.call("accelerate.tracking", lambda it: put(it, "filter_trackers", lambda *_: []))

    def _of_arrow(self, arrow: Any) -> None:
        """Arrow opens files by itself."""
        for name in ("memory_map", "input_stream"):
            put(arrow, name, self._reading(getattr(arrow, name)))
        put(arrow, "OSFile", self._opening(arrow.OSFile))

    def _of_tokenizers(self, tokenizers: Any) -> None:
        """Tokenizers write files by themselves."""
        kind = tokenizers.PreTrainedTokenizerBase
        save = kind.save_pretrained

        def saved(one: Any, save_directory: Any, *arguments: Any, **options: Any) -> Any:
            return save(one, self._where(save_directory, True), *arguments, **options)

        put(kind, "save_pretrained", saved)

    def _ours(self, path: Any, folder: int | None = None) -> tuple[str, str] | None:
        """A path, relative to an open folder perhaps, and its place in the folder; None if it is a descriptor
        or nothing that a plan leaves alone."""
        try:
            path = os.fsdecode(path)
        except TypeError:  # a descriptor
            return None
        if folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        whole = os.path.abspath(path)
        return None if whole.startswith(self._scratch) else (whole, self._folder + whole)

    def _where(self, path: Any, writes: bool, folder: int | None = None) -> Any:
        """The place of a file: in the folder if it is written now, or was before."""
        found = self._ours(path, folder)
        if found is None:
            return path
        whole, ours = found
        if not writes:
            if _lexists(ours):
                return ours
            self._read.add(whole)
            return path
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
            where = self._where(path, bool(flags & _WRITES), options.get("dir_fd"))
            return before(where, flags, *arguments, **options)

        return opened

    def _writing(self, before: Callable[..., Any], paths: int) -> Callable[..., Any]:
        def done(*arguments: Any, **options: Any) -> Any:
            folder = options.get("dir_fd")
            placed = [self._where(path, True, folder) for path in arguments[:paths]]
            return before(*placed, *arguments[paths:], **options)

        return done

    def _linking(self, before: Callable[..., None]) -> Callable[..., None]:
        def linked(to: Any, path: Any, *arguments: Any, **options: Any) -> None:
            whole = os.path.join(os.path.dirname(os.path.abspath(path)), to)
            before(self._where(whole, False), self._where(path, True), *arguments, **options)

        return linked

    def _removing(self, before: Callable[..., None]) -> Callable[..., None]:
        """What is not in the folder stays where it is."""

        def removed(path: Any, **options: Any) -> None:
            found = self._ours(path, options.get("dir_fd"))
            if found is None or _lexists(found[1]) or not _lexists(found[0]):
                before(found[1] if found else path, **options)

        return removed

    def _reading(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def done(path: Any, *arguments: Any, **options: Any) -> Any:
            where = self._where(path, False, options.get("dir_fd"))
            return before(where, *arguments, **options)

        return done

    def _both(self, path: Any) -> list[Any]:
        """The folders that are one for the program: its own, if it is there, and what it has written."""
        where = self._where(path, False)
        if (found := self._ours(path)) is not None:
            self._read.add(os.path.join(found[0], ""))
        return [path, where] if where != path and _is_there(path) else [where]

    def _listing(self, before: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def listed(path: Any = ".") -> list[Any]:
            return [*dict.fromkeys(name for one in self._both(path) for name in before(one))]

        return listed

    def _scanning(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def scanned(path: Any = ".") -> Any:
            if len(folders := self._both(path)) == 1:
                return before(*folders)
            found = {entry.name: entry for one in folders for entry in before(one)}
            return _Entries(found.values())

        return scanned


class _Entries(Iterator[Any]):
    """What is in a folder, as ``os.scandir`` gives it."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._left = iter(entries)

    def __next__(self) -> Any:
        return next(self._left)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None: ...

    close = __exit__


_lexists = os.path.lexists
_stat = os.stat


def _is_there(path: Any) -> bool:
    """Whether there is a file without what a plan has written."""
    try:
        return bool(_stat(path))
    except OSError:
        return False


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


def _no_callbacks(integrations: Any) -> None:
    put(integrations, "get_reporting_integration_callbacks", lambda *_: [])


def _no_reports(arguments: Any) -> None:
    begin = arguments.TrainingArguments.__post_init__

    def begun(one: Any) -> None:
        begin(one)
        one.report_to = []  # trainers ask this, too

    put(arguments.TrainingArguments, "__post_init__", begun)


def _no_hub(trainer: Any) -> None:
    evaluate = trainer.Trainer.evaluate
    put(trainer.Trainer, "evaluate", torch.no_grad()(evaluate))  # also what is around its model
    put(trainer.Trainer, "init_hf_repo", lambda *_, **__: None)
    put(trainer.Trainer, "push_to_hub", lambda *_, **__: None)
    put(trainer.Trainer, "_save_checkpoint", lambda *_, **__: None)
    put(trainer.Trainer, "save_model", lambda *_, **__: None)
