"""Run a function on several ranks: real processes, a real gloo group on loopback, bounded in time.

A hang is the failure that matters most here, so nothing waits without a limit: when the time is up the
ranks are killed, and the test fails with the traceback of where each of them was.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Imported once, in the server that all ranks are forked from: torch and torchtune take seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.helpers.preload"])


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*arguments)`` on every rank, and give what each of them returned.

    Raises:
        AssertionError: a rank raised, died, or was not done in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(ranks):
            receiver, sender = _context.Pipe(duplex=False)
            setting = (rank, ranks, folder, timeout, environment or {})
            process = _context.Process(
                target=_rank_main, args=(function, arguments, setting, sender), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], folder: Path, timeout: float) -> list[Any]:
    end = time.monotonic() + timeout
    results: dict[int, Any] = {}
    problems: list[str] = []
    while len(results) < len(pipes) and not problems:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in results]
            problems.append(f"ranks {late} were not done within {timeout:g} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                kind, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                kind, value = "error", "the process died without a word"
            results[rank] = value
            if kind == "error":
                problems.append(f"rank {rank}: {value}")
    if problems:
        stacks = [f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("stack_*"))]
        raise AssertionError("\n".join([*problems, *stacks]))
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    setting: tuple[int, int, str, float, dict[str, str]],
    sender: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    rank, ranks, folder, timeout, environment = setting
    with open(Path(folder) / f"stack_{rank}", "w") as stack:
        # Just before the time is up, so that the parent finds it when it gives up.
        faulthandler.dump_traceback_later(timeout * 0.97, file=stack)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",
            **environment,
        )
        torch.set_num_threads(1)
        try:
            store = dist.FileStore(str(Path(folder) / "rendezvous"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            message = ("result", function(*arguments))
            if dist.is_initialized():
                dist.barrier()  # or a rank that leaves first may abort another one's last collective
                dist.destroy_process_group()
        except BaseException:
            message = ("error", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
    sender.send(message)
