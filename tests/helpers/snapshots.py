"""Runs that take snapshots and are killed, on one machine or on several."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import RESUME, Records
from torchtune_adaptive.recipe.checkpoints.snapshots import Snapshots
from torchtune_adaptive.recipe.train.loop import TrainingLoop

EVERY = "adaptive_batching.snapshot_every_n_steps"


def run_killed(kind: str, cfg: DictConfig, after: int, written: bool = True) -> None:
    """A run of which all ranks are killed after a step, when its snapshots are ``written``."""
    step, take = TrainingLoop._step, Snapshots.take

    def step_or_die(self: TrainingLoop, epoch: int) -> Any:
        if self.global_step == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, epoch)

    def take_and_wait(self: Snapshots, *arguments: Any) -> None:
        take(self, *arguments)
        self._finish()

    TrainingLoop._step = step_or_die  # type: ignore[method-assign]
    if written:
        Snapshots.take = take_and_wait  # type: ignore[method-assign]
    run_ours(kind, cfg)


class Machines:
    """Machines on which a run is trained, each with a folder of its own for snapshots.

    Args:
        of: for each rank, the number of its machine.
        folder: the folder for all of it.
    """

    def __init__(self, of: Sequence[int], folder: Path, kind: str = "full", **changes: Any) -> None:
        self.of, self.folder, self.kind, self.changes = of, folder, kind, changes

    def memory(self, machine: int) -> Path:
        return self.folder / f"machine_{machine}"

    def killed(self, after: int, before: Callable[[], object] | None = None) -> None:
        """Kill all ranks of a run after a step."""
        ended = watch_ranks(
            _on_machine,
            len(self.of),
            self,
            self._cfg(),
            run_killed,
            (after,),
            before,
            until_exit_of=[*range(len(self.of))],
            join=False,
        )
        assert all(each.exit_code == -signal.SIGKILL for each in ended), ended[0].said

    def train(self, before: Callable[[], object] | None = None, **changes: Any) -> Records:
        """Run to the end; what rank 0 logged."""
        cfg = self._cfg(**changes)
        arguments = (self, cfg, run_ours, (), before)
        return run_ranks(_on_machine, len(self.of), *arguments, join=False)[0]  # type: ignore[no-any-return]

    def resume(self, of: Sequence[int]) -> Records:
        """Go on, on these machines; what rank 0 logged."""
        return Machines(of, self.folder, self.kind, **self.changes).train(**RESUME)

    def taken(self) -> dict[int, set[int]]:
        """The machines on which there is anything of the snapshots, by their steps."""
        found: dict[int, set[int]] = {}
        for machine in sorted({*self.of}):
            for each in self.memory(machine).glob("*/*/epoch_*"):
                found.setdefault(int(each.name.rpartition("_")[2]), set()).add(machine)
        return found

    def _cfg(self, **changes: Any) -> DictConfig:
        return tiny_config(self.kind, self.folder / "out", **self.changes, **changes)


def _on_machine(
    machines: Machines,
    cfg: DictConfig,
    run: Callable[..., Any],
    arguments: tuple[Any, ...],
    before: Callable[[], object] | None,
) -> Any:
    """Run on a rank as if it was on its machine."""
    rank = int(os.environ["RANK"])
    here = [each for each, machine in enumerate(machines.of) if machine == machines.of[rank]]
    os.environ.update(LOCAL_RANK=str(here.index(rank)), LOCAL_WORLD_SIZE=str(len(here)))
    cfg.adaptive_batching.snapshot_folder = str(machines.memory(machines.of[rank]))
    if before is not None:
        before()
    return run(machines.kind, cfg, *arguments)
