"""Run a function on several ranks: real processes, a real gloo group on loopback, limited in time.

A hang is the failure that matters most here, so every wait has a limit: when the time is up, the ranks are
killed and the test fails with the traceback of where each of them was.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtune_adaptive.core.ranks.agreement import Ranks


class Alone(Ranks):
    """One rank, or some that always agree, without a process group."""

    _group = None

    def __init__(self, size: int = 1) -> None:
        self.rank, self.size = 0, size

    def any(self, flag: bool) -> bool:
        return flag

    def spread(self, number: int) -> tuple[int, int]:
        return number, number

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def from_rank_zero(self, value: Any) -> Any:
        return value


_SHOWN = 8000  # characters of a rank's output, and of its stacks
_START = 300.0  # seconds that a rank may take to start, or to say where it is

# A server imports what ranks need once, and forks them: imports take seconds, a fork a few milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.helpers.preload"])


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 600.0,
    join: bool = True,
    forked: bool = True,
) -> list[Any]:
    """Call ``function(*arguments)`` on every rank, and return what each call returned.

    Args:
        function: a module-level function; its arguments and results must be picklable.
        ranks: number of ranks.
        timeout: seconds after the start of all ranks after which the test has failed.
        join: whether to create the process group; if not, the function does, as a launched process would.
        forked: whether ranks may be forked. One that uses CUDA may not, because importing torchtune
            initializes it where there is a GPU.

    Raises:
        AssertionError: a rank raised, died, or was not done in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context: Any = _context if forked else multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            setting = _Setting(rank, ranks, store.port, folder, join)
            process = context.Process(
                target=_rank_main, args=(function, arguments, setting, sender), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            _wait_for_start(processes, Path(folder))
            return _collect(processes, pipes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


@dataclass(frozen=True)
class _Setting:
    rank: int
    ranks: int
    port: int
    folder: str
    join: bool


@dataclass(frozen=True)
class Ended:
    """How a rank ended, and all its output."""

    exit_code: int | None
    said: str


def watch_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    until_exit_of: list[int],
    timeout: float = 600.0,
    join: bool = True,
) -> list[Ended]:
    """Like ``run_ranks``, for ranks that may die: wait for some of them to exit, then kill the others.

    Raises:
        AssertionError: one that should exit did not in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            setting = _Setting(rank, ranks, store.port, folder, join)
            process = _context.Process(
                target=_rank_main_to_file, args=(function, arguments, setting), daemon=True
            )
            process.start()
            processes.append(process)
        try:
            _wait_for_start(processes, Path(folder))
            end = time.monotonic() + timeout
            for rank in until_exit_of:
                processes[rank].join(timeout=max(0.0, end - time.monotonic()))
            exit_codes = [process.exitcode for process in processes]
            if any(exit_codes[rank] is None for rank in until_exit_of):
                _ask_where_they_are(processes, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.join()
        said = [_said(Path(folder), rank) for rank in range(ranks)]
    everything = "\n".join(said)
    for rank in until_exit_of:
        assert exit_codes[rank] is not None, (
            f"rank {rank} is still running after {timeout:g} s: {everything}"
        )
    return [Ended(code, text) for code, text in zip(exit_codes, said, strict=True)]


def _wait_for_start(processes: list[BaseProcess], folder: Path) -> None:
    """Wait until each rank runs. On a busy machine that may take longer than a test gives its function."""
    end = time.monotonic() + _START
    for rank, process in enumerate(processes):
        stack = folder / f"stack_{rank}"
        while process.is_alive() and not stack.exists() and time.monotonic() < end:
            time.sleep(0.002)


def _ask_where_they_are(processes: list[BaseProcess], folder: Path) -> None:
    """Make the ranks that still run write their stacks to their files."""
    for rank, process in enumerate(processes):
        stack = folder / f"stack_{rank}"
        if not process.is_alive() or not stack.exists():
            continue
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
        end, written = time.monotonic() + _START, 0
        while process.is_alive() and time.monotonic() < end:
            time.sleep(0.1)
            before, written = written, stack.stat().st_size
            if written and written == before:
                break


def _collect(
    processes: list[BaseProcess], pipes: list[Connection], folder: Path, timeout: float
) -> list[Any]:
    end = time.monotonic() + timeout
    results: dict[int, Any] = {}
    problems: list[str] = []
    while len(results) < len(pipes) and not problems:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in results]
            problems.append(f"ranks {late} were not done within {timeout:g} s")
            _ask_where_they_are(processes, folder)
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                kind, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(timeout=60)
                kind, value = "error", f"the process died, exit code {processes[rank].exitcode}"
            results[rank] = value
            if kind == "error":
                problems.append(f"rank {rank}: {value}")
    if problems:
        for rank in range(len(pipes)):
            problems.append(f"rank {rank}, its last output:\n{_said(folder, rank, _SHOWN)}")
        raise AssertionError("\n".join(problems))
    return [results[rank] for rank in range(len(pipes))]


def _said(folder: Path, rank: int, most: int | None = None) -> str:
    """The output of a rank and, if it crashed or the time was up, where it was; of each so many characters.

    Stacks begin with the thread that crashed, and end with the main thread.
    """
    paths = (folder / f"said_{rank}", folder / f"stack_{rank}")
    said, stacks = (path.read_text() if path.exists() else "" for path in paths)
    if most is not None and len(stacks) > most:
        stacks = f"{stacks[: most // 4]}\n[...]\n{stacks[most // 4 - most :]}"
    return (said if most is None else said[-most:]) + stacks


def _rank_main(
    function: Callable[..., Any], arguments: tuple[Any, ...], setting: _Setting, sender: Connection
) -> None:
    _say_to_file(setting)  # or nobody sees what a library says before it aborts the process
    try:
        message = ("result", _call(function, arguments, setting))
    except BaseException:
        message = ("error", traceback.format_exc())
    sender.send(message)


def _rank_main_to_file(
    function: Callable[..., Any], arguments: tuple[Any, ...], setting: _Setting
) -> None:
    _say_to_file(setting)
    _call(function, arguments, setting)


def _say_to_file(setting: _Setting) -> None:
    with open(Path(setting.folder) / f"said_{setting.rank}", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], setting: _Setting) -> Any:
    os.environ.update(
        RANK=str(setting.rank),
        WORLD_SIZE=str(setting.ranks),
        LOCAL_RANK=str(setting.rank),
        LOCAL_WORLD_SIZE=str(setting.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setting.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the parent's
    )
    torch.set_num_threads(1)
    logging.disable(logging.NOTSET)  # which plans do in the fork server, if they start it
    # As in a process that was launched: those that load data are forked, and end when this rank is killed. A
    # fork server of its own would import everything again, and not end as long as what it has forked waits.
    multiprocessing.set_start_method("fork", force=True)
    gc.freeze()  # what was imported stays; collections then take no time
    with open(Path(setting.folder) / f"stack_{setting.rank}", "w") as stack:
        faulthandler.enable(file=stack)
        faulthandler.register(signal.SIGUSR1, file=stack)  # the parent asks when the time is up
        try:
            if setting.join:
                dist.init_process_group("gloo")
            result = function(*arguments)
            if dist.is_initialized():
                dist.barrier()  # or a rank that leaves first may abort another one's last collective
                dist.destroy_process_group()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()
    return result
