"""Seconds from ``kill -9`` of a rank to the next trained step: ``tune run`` and ``tune-adaptive run``.

    python benchmarks/restarts.py --times 3

Both train the tiny model on two ranks of this machine with ``--max-restarts 1``, in turn. Rank 1 is killed
after step 3, and the run is resumed from step 2. Needs Linux.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAMS = ("tune", "tune-adaptive")
LIMIT = 300.0
RECIPE = """
import os
from pathlib import Path
from adaptive_full_finetune_distributed import recipe_main

if __name__ == "__main__":
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    Path(f"imported_{attempt}_{rank}").write_text(str(os.getpid()))
    recipe_main()
"""
"""Says when a rank has imported what it needs, and which process it is."""
ARGUMENTS = (
    *("--nproc_per_node", "2", "--max-restarts", "1", "timed.py", "--config", "tiny/full"),
    *("output_dir=out", "batch_size=2", "use_maximum_batch_size=False", "save_every_n_steps=2"),
    *("max_steps_per_epoch=400", "epochs=1", "resume_from_checkpoint=True"),
    *("adaptive_batching.cache=False",),
)
PARTS = ("other rank gone", "new processes", "imported", "resumed", "step trained")


def until(found: Callable[[], Any], run: subprocess.Popen[bytes]) -> Any:
    """Wait until something is found."""
    end = time.monotonic() + LIMIT
    while not (result := found()):
        assert time.monotonic() < end and run.poll() is None, (
            "the run did not come so far: see `said`"
        )
        time.sleep(0.005)
    return result


def processes_of(launcher: int) -> dict[int, float]:
    """All that a launcher has started, and itself; each with the seconds of CPU that it has used."""
    parents, seconds = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if state != "Z":
            pid = int(file.parent.name)
            parents[pid] = int(parent)
            seconds[pid] = sum(map(int, fields[9:11])) / os.sysconf("SC_CLK_TCK")

    def belongs(pid: int) -> bool:
        return pid == launcher or (pid in parents and belongs(parents[pid]))

    return {pid: seconds[pid] for pid in parents if belongs(pid)}


def measured(program: str, overrides: list[str]) -> dict[str, float]:
    """Seconds after the kill, by part; and the seconds of CPU of all processes until then."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "timed.py").write_text(RECIPE)
        said = folder / "said"
        with said.open("wb") as output:
            run = subprocess.Popen(
                [Path(sys.executable).parent / program, "run", *ARGUMENTS, *overrides],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            return _killed(run, folder, said)
        except AssertionError:
            print(said.read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            run.terminate()
            run.wait(timeout=LIMIT)


def _killed(run: subprocess.Popen[bytes], folder: Path, said: Path) -> dict[str, float]:
    def steps(number: int) -> bool:
        logs = (
            sorted((folder / "out" / "logs").glob("*"))
            if (folder / "out" / "logs").is_dir()
            else []
        )
        return len(logs) > number and bool(re.search(r"Step [3-9]", logs[number].read_text()))

    def imported(attempt: int, rank: int) -> int | None:
        file = folder / f"imported_{attempt}_{rank}"
        return int(file.read_text() or 0) if file.exists() else None

    until(lambda: steps(0), run)
    other, killed = imported(0, 0), imported(0, 1)
    assert other and killed
    before = processes_of(run.pid)
    at = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    found: dict[str, float] = {}

    def note(part: str, happened: Callable[[], Any]) -> None:
        until(happened, run)
        found[part] = time.monotonic() - at

    note("other rank gone", lambda: other not in processes_of(run.pid))
    note("new processes", lambda: len(processes_of(run.pid).keys() - before.keys()) >= 2)
    note("imported", lambda: imported(1, 0) and imported(1, 1))
    note("resumed", lambda: "Resuming from" in said.read_text())
    note("step trained", lambda: steps(1))
    after = processes_of(run.pid)
    found["CPU"] = sum(cpu - before.get(pid, 0.0) for pid, cpu in after.items())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--times", type=int, default=3, help="restarts of each; medians are printed"
    )
    parser.add_argument("--search", action="store_true", help="with a search for the batch size")
    given = parser.parse_args()
    overrides = ["use_maximum_batch_size=True"] if given.search else []
    runs: dict[str, list[dict[str, float]]] = {program: [] for program in PROGRAMS}
    for _ in range(given.times):
        for program in PROGRAMS:
            runs[program].append(measured(program, overrides))
    medians = {
        program: {
            part: statistics.median(run[part] for run in all_runs) for part in (*PARTS, "CPU")
        }
        for program, all_runs in runs.items()
    }
    print(f"Median of {given.times}, seconds after the kill:")
    print(f"{'':<18}" + "".join(f"{program + ' run':>20}" for program in PROGRAMS))
    for part in (*PARTS, "CPU"):
        label = "seconds of CPU" if part == "CPU" else part
        print(f"{label:<18}" + "".join(f"{medians[program][part]:>20.1f}" for program in PROGRAMS))
    for part, what in (("step trained", "time"), ("CPU", "CPU")):
        theirs, ours = (medians[program][part] for program in PROGRAMS)
        print(f"`tune run` takes {theirs / ours:.1f} times the {what} of `tune-adaptive run`.")


if __name__ == "__main__":
    main()
