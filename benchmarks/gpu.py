"""All the evidence that takes a GPU, in pieces: run them, continue where the last call stopped, report.

    python benchmarks/gpu.py                          # what is left to do; build/gpu.md has the results
    python benchmarks/gpu.py --for 540 --out results  # in nine minutes, with the state in results
    python benchmarks/gpu.py --only Tests "3B full"   # pieces by parts of their names
    python benchmarks/gpu.py --list                   # the pieces, and which of them are done
    python benchmarks/gpu.py --device cpu             # a rehearsal with small models, without a GPU

A machine with a GPU may be lent for minutes. So each piece has a limit, none is begun that might not end in
time, and after each its result is on disk, and in the report. The pieces are in the order of what we most
want to know; all of them fit into five calls of nine minutes. A piece that failed, or was stopped by its
limit, is run again when all have been run; what it had found until then is kept. Each call ends with a table
of what is known, to be pasted into an issue. What was measured on another device, torch or version of the
sources is not mixed in: then all pieces are run again. With `--keep`, what passed with other sources is not
run again, and the table names these sources.

It needs a Python with torch, torchtune and pytest; docs/gpu.md has a way for a machine without network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path

from gpu_cases import FASTEST, FIRST, OTHERS
from gpu_facts import ASKED, is_fact, shown, told

ROOT = Path(__file__).parent.parent
SOURCES = ("torchtune_adaptive", "benchmarks", "configs", "tests/gpu", "tests/helpers")


@dataclass(frozen=True)
class Piece:
    """One command, with what its output is called in the report."""

    name: str
    command: str
    limit: float
    """The seconds that it may take; then it is stopped."""


@dataclass(frozen=True)
class Result:
    """The end of a piece."""

    command: str
    exit_code: int | None
    """None if it ran out of time."""
    seconds: float
    output: str
    facts: dict[str, str] = field(default_factory=dict)
    """What it has found."""
    earlier: dict[str, str] = field(default_factory=dict)
    """What runs before it have found that it did not reach."""
    sources: str = ""
    """The version of the sources that was run."""

    @property
    def ended(self) -> str:
        if self.exit_code is None:
            return f"stopped after {self.seconds:.0f} s"
        return (
            f"{'passed' if self.exit_code == 0 else f'exit {self.exit_code}'}, {self.seconds:.0f} s"
        )


def all_pieces(device: str) -> list[Piece]:
    """The pieces in the order of what we most want to know."""

    slower = 1 if device == "cuda" else 3  # each step is counted on the simulated device

    def tests(file: str, name: str, limit: float) -> Piece:
        # Plugins that are installed there are not loaded (see ``main``), and no warning is an error.
        options = "-m gpu --exhaustive -v --no-header -W default"
        return Piece(f"Tests: {name}", f"-m pytest {options} tests/gpu/{file}.py", limit)

    def benchmark(file: str, of: str, name: str, limit: float, rest: str = "") -> Piece:
        command = f"benchmarks/gpu_{file}.py {shlex.quote(of)} --device {device}{rest}"
        return Piece(f"{name}, {of}", command, limit * slower)

    budget = (
        "--rounds 3 --steps 4"
        if device == "cuda"
        else "--rounds 1 --limit 128MiB --ways fixed budget"
    )
    return [
        tests("test_gpu", "out of memory", 60),
        tests("test_two_ranks", "out of memory on one of two ranks", 120),
        tests("test_nccl", "what NCCL counts", 30),
        tests("test_context_parallel", "attention over parts of rows", 35),
        tests("test_dropout", "dropout by sample", 45),
        tests("test_recipe", "recipes from end to end", 180),
        Piece("A step", f"benchmarks/gpu_step.py --device {device}", 60 * slower),
        *(benchmark("plan", case.name, "Prediction", 90) for case in FIRST),
        *(benchmark("search", model, "Sizes found", 120) for model in ("1B", "3B", "8B")),
        *(benchmark("fastest", model, "Fastest configuration", 200) for model in FASTEST),
        Piece(
            "Token budget", f"benchmarks/token_budget.py --device {device} {budget}", 150 * slower
        ),
        # As on a smaller GPU, so that steps at the largest size take less time.
        *(benchmark("plan", case.name, "Prediction", 60, " --memory 64GiB") for case in OTHERS),
    ]


class Progress:
    """A record of what has been done on one machine, in a file that is always whole.

    Args:
        path: the file.
        machine: the machine. What was done on another one is forgotten.
        sources: the version of the sources.
        keep: whether results of other sources are kept.
    """

    def __init__(self, path: Path, machine: str, sources: str = "", keep: bool = False) -> None:
        self._path = path
        self.machine, self.sources = machine, sources
        self.results: dict[str, Result] = {}
        try:
            state = json.loads(path.read_text())
            if state["machine"] == machine:
                results = {name: Result(**r) for name, r in state["results"].items()}
                self.results = {n: r for n, r in results.items() if keep or r.sources == sources}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nothing yet, or nothing of use

    @property
    def where(self) -> str:
        """The machine and the version of the sources."""
        return f"{self.machine}, sources {self.sources}" if self.sources else self.machine

    def result(self, piece: Piece) -> Result | None:
        """The result of a piece, if it has been run as it is now."""
        result = self.results.get(piece.name)
        return result if result is not None and result.command == piece.command else None

    def is_done(self, piece: Piece) -> bool:
        result = self.result(piece)
        return result is not None and result.exit_code == 0

    def left(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces that are not done: first those that have not been run, then those that failed."""
        left = [piece for piece in pieces if not self.is_done(piece)]
        return sorted(left, key=lambda piece: self.result(piece) is not None)

    def add(self, piece: Piece, result: Result) -> None:
        """Record the result of a piece, also while it runs: as that of a piece that was stopped there."""
        before, earlier = self.result(piece), {}
        if before is not None and result.exit_code != 0:
            known = before.earlier | before.facts
            earlier = {what: known[what] for what in known if what not in result.facts}
        self.results[piece.name] = replace(result, earlier=earlier, sources=self.sources)
        results = {name: asdict(result) for name, result in self.results.items()}
        write(self._path, json.dumps({"machine": self.machine, "results": results}, indent=1))


def write(path: Path, text: str) -> None:
    """Write a file, which has its old or its new text whenever this is interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def run(piece: Piece, so_far: Callable[[Result], None] = lambda result: None) -> Result:
    """Run a piece, with its output on the screen as it comes; ``so_far`` is told with each fact."""
    started = time.monotonic()
    lines: list[str] = []
    facts: dict[str, str] = {}

    def result(code: int | None) -> Result:
        seconds = round(time.monotonic() - started, 1)
        return Result(piece.command, code, seconds, "".join(lines), {**facts})

    with subprocess.Popen(
        [
            "timeout",
            "--kill-after=5",
            str(piece.limit),
            sys.executable,
            *shlex.split(piece.command),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not is_fact(line):
                print(line, end="", flush=True)
                lines.append(line)
            if found := told(line):
                facts |= found
                so_far(result(None))  # this call may be ended as well
    code: int | None = process.wait()
    if code in (124, 137):  # coreutils' timeout stopped it
        code = None
    return result(code)


def table(pieces: Sequence[Piece], progress: Progress) -> str:
    """What is known, in one table of Markdown."""
    rows = [f"| {progress.where} | | |", "|---|---|---|"]
    for piece in pieces:
        result = progress.result(piece)
        ended = "not measured" if result is None else result.ended
        if result is not None and result.sources != progress.sources:
            ended += f" (sources {result.sources})"
        rows.append(f"| {piece.name} | | {ended} |")
        if result is not None:
            rows += [f"| | {what} | {found} |" for what, found in shown(result.facts).items()]
            before = shown(result.earlier).items()
            rows += [f"| | {what} | {found} (in an earlier run) |" for what, found in before]
    return "\n".join(rows)


def report(pieces: Sequence[Piece], progress: Progress) -> str:
    """The report, as far as it can be written."""
    results = {piece.name: progress.result(piece) for piece in pieces}
    not_run = [name for name, result in results.items() if result is None]
    stopped = [name for name, result in results.items() if result and result.exit_code is None]
    failed = [name for name, result in results.items() if result and result.exit_code]
    text = [f"# Tests and benchmarks for a GPU\n\n{progress.where}. Made by `benchmarks/gpu.py`.\n"]
    text.append(f"\n{table(pieces, progress)}\n")
    for what, names in (("Not reached", not_run), ("Stopped", stopped), ("Failed", failed)):
        if names:
            text.append(f"\n{what}: {'; '.join(names)}.\n")
    for piece in pieces:
        text.append(f"\n## {piece.name}\n\n`python {piece.command}`: ")
        if (result := results[piece.name]) is None:
            text.append("not run yet.\n")
        else:
            text.append(f"{result.ended}.\n\n```\n{result.output.strip()}\n```\n")
    return "".join(text)


def run_all(
    pieces: Sequence[Piece], progress: Progress, report_path: Path, ends: float, only: Sequence[str]
) -> bool:
    """Run what is not done yet and ends in time; whether all of it is done now.

    Args:
        pieces: all pieces, which the report tells of.
        progress: what has been done.
        report_path: the file for the report.
        ends: the time, by ``time.monotonic``, at which the last piece must have ended.
        only: parts of the names of the pieces that are asked for; none for all.
    """
    asked = [piece for piece in pieces if is_asked(piece, only)]
    write(report_path, report(pieces, progress))
    for piece in progress.left(asked):
        if time.monotonic() + piece.limit > ends:
            print(f"== {piece.name}: left, as it may take {piece.limit:g} s", flush=True)
            continue
        print(f"\n== {piece.name}: python {piece.command}", flush=True)
        result = run(piece, partial(progress.add, piece))
        progress.add(piece, result)
        write(report_path, report(pieces, progress))
        print(f"== {piece.name}: {result.ended}", flush=True)
    return all(progress.is_done(piece) for piece in asked)


def is_asked(piece: Piece, only: Sequence[str]) -> bool:
    return not only or any(part.lower() in piece.name.lower() for part in only)


def machine(device: str) -> str | None:
    """The machine that the results belong to; None if there is no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0) if device == "cuda" else "a simulated device"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def sources() -> str:
    """A short name for all that may change the results; there may be no git to ask."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:10]


def main() -> int:
    started = time.monotonic()
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names")
    arguments.add_argument(
        "--for",
        type=float,
        default=inf,
        metavar="SECONDS",
        dest="seconds",
        help="begin no piece that might not end within so many seconds",
    )
    arguments.add_argument(
        "--out", type=Path, default=ROOT / "build", metavar="DIR", help="for gpu.json and gpu.md"
    )
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments.add_argument("--list", action="store_true", help="list the pieces and exit")
    arguments.add_argument("--fresh", action="store_true", help="run all pieces again")
    arguments.add_argument(
        "--keep", action="store_true", help="keep the results of other versions of the sources"
    )
    asked = arguments.parse_args()
    pieces = all_pieces(asked.device)
    if not any(is_asked(piece, asked.only) for piece in pieces):
        arguments.error(f"--only {' '.join(asked.only)}: no such piece; --list names them")
    where = machine(asked.device)
    if where is None and not asked.list:
        print("gpu.py: no CUDA device. Run it where there is one, or with --device cpu.")
        return 1
    state = asked.out / "gpu.json"
    if asked.fresh and not asked.list:
        state.unlink(missing_ok=True)
    progress = Progress(state, where or "no CUDA device", sources(), asked.keep)
    if asked.list:
        for piece in pieces:
            done = "done" if progress.is_done(piece) else ""
            print(f"{done:4}  {piece.limit:4g} s  {piece.name}")
        return 0
    paths = [str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["PYTHONUNBUFFERED"] = "1"  # what a piece said is there even if it is stopped
    ends = started + asked.seconds
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = os.environ[ASKED] = "1"
    done = run_all(pieces, progress, asked.out / "gpu.md", ends, asked.only)
    print(f"\n{table(pieces, progress)}")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
