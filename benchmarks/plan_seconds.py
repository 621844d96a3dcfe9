"""Seconds to the answer of `tune-adaptive plan`, as a user asks for it, for models of many layers.

    python benchmarks/plan_seconds.py [--only 70B] [--whole]

Each question is asked for the first time, with nothing remembered. The headline says what fits and how fast
it is; details follow. CPU seconds are those of all processes of the command: they depend less on what else
runs on the machine. With ``--whole``, each question is asked once more with all layers traced, which takes
minutes. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

QUESTIONS = {
    "8B full, 8 x H100": "llama3_1/8B_full --nproc 8 --gpu h100 --no-what-ifs",
    "70B QLoRA, 2 x 4090": "llama3_3/70B_qlora --nproc 2 --gpu 4090 --no-what-ifs",
    "405B full, 512 x H100": "llama3_1/8B_full --nproc 512 --gpu h100 --no-what-ifs"
    " model._component_=torchtune.models.llama3_1.llama3_1_405b",
    "GRPO 8B, 8 x H100": "llama3_1/8B_adaptive_grpo --nproc 8 --gpu h100",
    "8B full, 8 x H100, --fastest": "llama3_1/8B_full --nproc 8 --gpu h100 --fastest",
}
PLAN = "import sys; from torchtune_adaptive.cli import answers, main; {}sys.exit(main())"
OF_ALL_LAYERS = "answers._PRELOAD = 'all_layers'; "
BECOME_PARENT_OF_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


class Seconds(NamedTuple):
    headline: float
    all: float
    cpu: float


def seconds(question: str, of_all_layers: bool) -> Seconds:
    """Ask in a process of its own, with an empty cache."""
    here = Path(__file__).parent
    start = PLAN.format(OF_ALL_LAYERS * of_all_layers)
    cpu, started = _cpu_seconds(), time.perf_counter()
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile() as progress:
        with subprocess.Popen(
            [sys.executable, "-c", start, "plan", *question.split()],
            env=os.environ | {"XDG_CACHE_HOME": cache, "PYTHONPATH": f"{here.parent}:{here}"},
            stdout=subprocess.PIPE,
            stderr=progress,
        ) as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            headline = time.perf_counter() - started
            process.stdout.read()
        everything = time.perf_counter() - started
        if not said:
            progress.seek(0)
            raise SystemExit(f"{question}: {progress.read().decode()}")
        with suppress(ChildProcessError):
            while True:  # processes that the command has left to end by themselves
                os.wait()
    return Seconds(headline, everything, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", default="", help="a part of the questions' names")
    arguments.add_argument("--whole", action="store_true", help="trace all layers, too")
    asked = arguments.parse_args()
    ctypes.CDLL(None).prctl(BECOME_PARENT_OF_ORPHANS, 1)
    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f} at the beginning\n"
    )
    print(f"{'seconds':40}{'headline':>10}{'all':>10}{'CPU':>10}")
    for name, question in QUESTIONS.items():
        if asked.only not in name:
            continue
        for of_all_layers in (False, True)[: 1 + asked.whole]:
            found = seconds(question, of_all_layers)
            label = f"{name}{', all layers' * of_all_layers}"
            print(f"{label:40}" + "".join(f"{one:>10.1f}" for one in found), flush=True)


if __name__ == "__main__":
    main()
