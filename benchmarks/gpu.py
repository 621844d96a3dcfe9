"""All the evidence that takes a GPU, in pieces: run them, continue where the last call stopped, report.

    make gpu                          # what is left to do; then docs/results/gpu.md is complete
    python benchmarks/gpu.py --list   # the pieces, and which of them are done
    python benchmarks/gpu.py --fresh  # forget what was done

A machine with a GPU may be lent for minutes. So no piece takes longer than ``LIMIT`` seconds, and each is on
disk, and in the report, as soon as it has ended. A piece that failed is run again by the next call. What was
measured on another device, torch or commit is not mixed in: then all pieces are run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtune_adaptive.common.durable import atomically

LIMIT = 520.0
ROOT = Path(__file__).parent.parent
STATE = ROOT / "build" / "gpu.json"
REPORT = ROOT / "docs" / "results" / "gpu.md"


@dataclass(frozen=True)
class Piece:
    """One command, and what its output is called in the report."""

    name: str
    command: str


@dataclass(frozen=True)
class Result:
    """The end of a piece."""

    command: str
    exit_code: int | None
    """None if it ran out of time."""
    seconds: float
    output: str

    @property
    def ended(self) -> str:
        if self.exit_code is None:
            return f"stopped after {self.seconds:.0f} s"
        return (
            f"{'passed' if self.exit_code == 0 else f'exit {self.exit_code}'}, {self.seconds:.0f} s"
        )


PIECES = (
    Piece("Tests", "-m pytest -m gpu -q tests/gpu"),
    *(
        Piece(f"Sizes found, Llama {model}", f"benchmarks/gpu_search.py --models {model}")
        for model in ("1B", "3B", "8B")
    ),
    *(
        Piece(f"Predictions, Llama {model}", f"benchmarks/gpu_plan.py --only {model}")
        for model in ("1B", "3B", "8B")
    ),
    *(
        Piece(
            f"The fastest configuration, Llama {model}", f"benchmarks/gpu_fastest.py --only {model}"
        )
        for model in ("1B", "3B")
    ),
    Piece("Token budget", "benchmarks/token_budget.py --device cuda --steps 4"),
)


class Progress:
    """A record of what has been done on one machine, in a file that is always whole."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path = path
        self.machine = machine
        self.results: dict[str, Result] = {}
        try:
            state = json.loads(path.read_text())
            if state["machine"] == machine:
                self.results = {name: Result(**r) for name, r in state["results"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nothing yet, or nothing of use

    def is_done(self, piece: Piece) -> bool:
        result = self.results.get(piece.name)
        return result is not None and result.exit_code == 0 and result.command == piece.command

    def add(self, piece: Piece, result: Result) -> None:
        self.results[piece.name] = result
        results = {name: asdict(result) for name, result in self.results.items()}
        with atomically(self._path) as temporary:
            temporary.write_text(
                json.dumps({"machine": self.machine, "results": results}, indent=1)
            )


def run(piece: Piece, limit: float) -> Result:
    """Run a piece, with its output on the screen as it comes."""
    started = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        ["timeout", "--kill-after=10", str(limit), sys.executable, *shlex.split(piece.command)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    code: int | None = process.wait()
    if code in (124, 137):  # coreutils' timeout stopped it
        code = None
    return Result(piece.command, code, round(time.monotonic() - started, 1), "".join(lines))


def report(pieces: Sequence[Piece], progress: Progress) -> str:
    """docs/results/gpu.md, as far as it can be written."""
    text = [f"# On a real GPU\n\n{progress.machine}. Made by `make gpu`.\n"]
    for piece in pieces:
        result = progress.results.get(piece.name)
        text.append(f"\n## {piece.name}\n\n`python {piece.command}`: ")
        if result is None:
            text.append("not run yet.\n")
        else:
            text.append(f"{result.ended}.\n\n```\n{result.output.strip()}\n```\n")
    return "".join(text)


def run_all(pieces: Sequence[Piece], progress: Progress, report_path: Path, limit: float) -> bool:
    """Run what is not done yet; whether all is done now."""
    for piece in pieces:
        if progress.is_done(piece):
            continue
        print(f"\n== {piece.name}: python {piece.command}", flush=True)
        result = run(piece, limit)
        progress.add(piece, result)
        report_path.parent.mkdir(parents=True, exist_ok=True)
        report_path.write_text(report(pieces, progress))
        print(f"== {piece.name}: {result.ended}", flush=True)
    return all(progress.is_done(piece) for piece in pieces)


def machine() -> str | None:
    """The machine that the results belong to; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return (
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, commit {commit or 'unknown'}"
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--list", action="store_true", help="list the pieces and exit")
    arguments.add_argument("--fresh", action="store_true", help="run all pieces again")
    asked = arguments.parse_args()
    if asked.fresh:
        STATE.unlink(missing_ok=True)
    where = machine()
    if where is None:
        print("gpu.py: no CUDA device. Run it on a machine that has one.", file=sys.stderr)
        return 1
    progress = Progress(STATE, where)
    if asked.list:
        for piece in PIECES:
            print(f"{'done' if progress.is_done(piece) else '    '}  {piece.name}")
        return 0
    paths = [str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return 0 if run_all(PIECES, progress, REPORT, LIMIT) else 1


if __name__ == "__main__":
    sys.exit(main())
