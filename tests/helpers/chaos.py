"""``ckpt-chaos``: a command is killed at each file event of its saves, and started again.

Imports would take most of the time. So the command is this file, as a client of a server that has imported
what jobs need: it forks a job for each client, and arms it as the tool's ``sitecustomize`` arms a new Python.
A job that is killed ends its client with the same status, and a client that is killed ends its job.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARDED = "adaptive_batching.sharded_checkpoints"
OF_RECIPES = ("tests.helpers.preload", "tests.helpers.killed_recipe")
OF_TRAINERS = ("tests.integrations.real.preload", "tests.integrations.real.killed")
"""What a server imports for these jobs."""
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
LOST = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"


def client(path: str, function: str, *arguments: str) -> int:
    """Let the server at ``path`` call ``module:function`` in a process of its own; its status."""
    with socket.socket(socket.AF_UNIX) as to:
        to.connect(path)
        message = json.dumps([function, arguments, dict(os.environ)]).encode()
        socket.send_fds(to, [struct.pack("!I", len(message))], [1, 2])
        to.sendall(message)
        status = to.recv(4)
    return struct.unpack("!i", status)[0] if status else 1


def serve(path: str, *modules: str) -> None:
    for module in modules:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        while True:
            from_client, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _attend(from_client)
            from_client.close()


def _attend(client: socket.socket) -> None:
    """Fork the job of a client, and tell it how that ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, given, _, _ = socket.recv_fds(client, 4, 2)
    [size] = struct.unpack("!I", head)
    message = b""
    while len(message) < size:
        message += client.recv(size - len(message))
    job = os.fork()
    if job == 0:
        client.close()
        _work(given, *json.loads(message))
    while os.waitid(os.P_PID, job, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if select.select([client], [], [], 0.05)[0]:  # it was killed
            os.kill(job, signal.SIGKILL)
            break
    status = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    try:
        client.sendall(struct.pack("!i", status if status >= 0 else 128 - status))
    finally:
        os._exit(0)


def _work(given: Sequence[int], function: str, arguments: list[str], env: dict[str, str]) -> None:
    status = 1
    try:
        for number, descriptor in enumerate(given, 1):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update(env)
        from ckpt_chaos.targets.common import arm_from_env

        # The rank that is to be killed is told where, and no other.
        rank = os.environ.setdefault("CKPT_CHAOS_CRASH_RANK", env.get("RANK", "0"))
        arm_from_env(int(rank), lazy=True)
        module, _, name = function.partition(":")
        getattr(import_module(module), name)(*arguments)
        status = 0
    except SystemExit as ending:
        status = int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def served(folder: Path, *modules: str) -> Iterator[Path]:
    """A server, which has imported modules; gives its socket."""
    path = folder / "jobs"
    command = [sys.executable, "-m", "tests.helpers.chaos", "serve", str(path), *modules]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **QUIET}, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            yield path
        finally:
            server.kill()


def crashed(
    server: Path, work: Path, function: str, *arguments: str, timeout: float = 3000, **options: Any
) -> dict[str, str]:
    """The verdict of each point at which a job was killed, and of one that was not.

    ``{out}`` in its arguments is its folder. Beside that it writes what has to be the same, named with
    ``.0`` after it. ``options`` are those of the tool.
    """
    given = {"result_file": "{out}.0", "timeout": 180, "fail_on": LOST, **options}
    named = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    python = [sys.executable, "-I", "-S", __file__, "client", str(server)]
    # Isolated, so that a client is not armed.
    command = [sys.executable, "-m", "ckpt_chaos", "run", f"--work={work}", *named, "--", *python]
    began = time.monotonic()
    done = subprocess.run(
        [*command, function, *arguments],
        cwd=ROOT,
        env={**os.environ, **QUIET},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    print(done.stdout, f"{time.monotonic() - began:.0f} s")
    verdicts = judged(work)
    assert verdicts, done.stdout
    return verdicts


def judged(work: Path) -> dict[str, str]:
    """The verdicts in the folder of a run of the tool. A job that ended has not reached its point."""
    from ckpt_chaos.runner import rejudge

    control, *points = rejudge(work)
    reached = {each.label: each.verdict if each.crashed else "NOT_REACHED" for each in points}
    return {control.label: control.verdict, **reached}


def recipe(jobs: Path, work: Path, way: str, **options: Any) -> dict[str, str]:
    """The verdicts of full fine-tuning by a recipe, whose checkpoints are saved in a way."""
    changes = {
        "gathered": {},
        "sharded": {SHARDED: True},
        "in the background": {SHARDED: "background"},
    }
    function = "tests.helpers.killed_recipe:main"
    return crashed(jobs, work, function, "{out}", "full", json.dumps(changes[way]), **options)


def trainer(jobs: Path, work: Path, *arguments: str, **options: Any) -> dict[str, str]:
    """The verdicts of a trainer; see ``tests.integrations.real.killed``."""
    newest = {"step_regex": r"begins at step (\d+)", "checkpoint_glob": "{out}/checkpoint-*"}
    function = "tests.integrations.real.killed:main"
    return crashed(jobs, work, function, "{out}", *arguments, **newest, **options)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        sys.exit(client(*sys.argv[2:]))
    serve(*sys.argv[2:])
