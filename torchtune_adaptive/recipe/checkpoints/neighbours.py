"""Snapshots in folders that each machine has for itself: the parts that are there, and copies of others.

Each machine has the parts of its own ranks, and a copy of its neighbour's. So one that is lost for good, with
all that it has, takes nothing with it that is not elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtune_adaptive.common import RankLost, durable
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone
from torchtune_adaptive.recipe.checkpoints.folder import OF_ALL, CheckpointFolder
from torchtune_adaptive.recipe.checkpoints.places import Places
from torchtune_adaptive.recipe.checkpoints.transfer import SILENCE, NoAnswer, Sent, exchange

_LONGEST_COPY = 600.0
"""Seconds after which a copy that is still being sent is given up."""


class Neighbours:
    """Completes what ranks have written on each of several machines. All ranks call all of it.

    Args:
        copies: whether each machine gets a copy of another one's parts.
        failed: function that is told, while training continues, why there are no copies.
    """

    def __init__(
        self,
        places: Places,
        folder: CheckpointFolder,
        everyone: AllOrNone,
        copies: bool,
        failed: Callable[[str], None],
    ) -> None:
        self.places = places
        self.is_copying = False
        """Whether this rank sends or receives at this moment."""
        self._folder = folder
        self._all = everyone
        self._copies = copies
        self._failed = failed
        self._between: Ranks | None = None

    def connect(self) -> None:
        """Have a group for copies, before a snapshot; they must not wait for what waits for them."""
        if not self._copies or self._between is not None:
            return
        problem: RankLost | None = None
        try:
            self._between = self._all.ranks.in_a_thread(SILENCE)
        except RankLost as error:
            problem = error
        said = [each for each in self._all.gather(problem and str(problem)) if each is not None]
        if said:
            self.close()
            self._copies = False
            self._failed(f"Snapshots have no copies on other machines any more: {said[0]}")

    def close(self) -> None:
        """Leave the group for copies."""
        if self._between is not None:
            self._between.close()
            self._between = None

    # --- in the thread that writes ---------------------------------------------------------------------

    def begin(
        self, name: str, in_thread: AllOrNone, describe: Callable[[BaseException], str]
    ) -> None:
        """Make the place where it is written, on the machines where rank 0 has not."""
        with in_thread.together(describe):
            if self.places.is_leader and not in_thread.ranks.is_zero:
                self._folder.begin(name)

    def complete(
        self,
        name: str,
        of_ranks: Sequence[durable.Files],
        small: Sequence[str],
        in_thread: AllOrNone,
        describe: Callable[[BaseException], str],
    ) -> tuple[dict[str, Any], durable.Files]:
        """Bring to each machine what it needs of the others.

        Args:
            of_ranks: the files that each rank has written.
            small: files that rank 0 has written for all.

        Returns:
            The facts of all machines, and the files of ranks that are here now.
        """
        folder = self._folder.staging / name
        self._distribute(folder, small, in_thread, describe)
        copied = self._copied(name, folder, of_ranks, in_thread)
        here = {*self.places.beside(self.places.rank)}
        known = {file: of for rank in here for file, of in of_ranks[rank].items()}
        known |= {
            file: of
            for rank, files in enumerate(of_ranks)
            for file, of in files.items()
            if self.places.neighbours[rank] in here and file in copied[self.places.neighbours[rank]]
        }
        newest = 0
        with suppress(OSError):  # or the others would wait
            newest = self._folder.newest_number()
        number = 1 + max(in_thread.gather(newest))
        of_all = sorted({file for files in of_ranks for file in files} | {*small})
        return {OF_ALL: of_all, "number": number}, known

    def _distribute(
        self,
        folder: Path,
        names: Sequence[str],
        in_thread: AllOrNone,
        describe: Callable[[BaseException], str],
    ) -> None:
        """Write files of rank 0 on the other machines."""
        contents = in_thread.decide(lambda: {one: (folder / one).read_bytes() for one in names})
        with in_thread.together(describe):
            if self.places.is_leader and not in_thread.ranks.is_zero:
                for name, content in contents.items():
                    (folder / name).write_bytes(content)

    def _copied(
        self, name: str, folder: Path, of_ranks: Sequence[durable.Files], in_thread: AllOrNone
    ) -> list[set[str]]:
        """The names of the files that each rank has copied from its neighbours."""
        if self._between is None or (group := self._between.group) is None:
            return [set()] * len(of_ranks)
        neighbours, me = self.places.neighbours, self.places.rank
        files = [
            Sent(file, size, checksum, rank, neighbours[rank])
            for rank, of_rank in enumerate(of_ranks)
            for file, (size, checksum) in sorted(of_rank.items())
        ]
        arrived, missing = set[str](), dict[int, bool]()
        self.is_copying = True
        try:
            arrived = exchange(files, group, folder, folder, _LONGEST_COPY)
        except NoAnswer as error:
            missing[error.rank] = error.is_late
        del group
        if missing:
            self.close()  # so that others, who wait for this one, go on
            for each in files:
                if each.target == me:
                    with suppress(OSError):
                        (folder / each.name).unlink(missing_ok=True)
        self.is_copying = False
        everyones = in_thread.gather((arrived, missing))
        if any(missing for _, missing in everyones):
            self.close()
            self._say_who_is_missing(name, [missing for _, missing in everyones])
            return [set()] * len(of_ranks)
        if lost := {file for files in of_ranks for file in files}.difference(
            *(arrived for arrived, _ in everyones)
        ):
            at = sorted({each.target for each in files if each.name in lost})
            self._failed(
                f"{len(lost)} files of the snapshot {name} have no copy on another machine, because they "
                f"could not be written there: {self.places.named(at)}."
            )
        return [arrived for arrived, _ in everyones]

    def _say_who_is_missing(self, name: str, missing: Sequence[dict[int, bool]]) -> None:
        """Those that were late for another rank; what they were late for, others have given up then."""
        late = {rank for each in missing for rank, is_late in each.items() if is_late}
        ranks = sorted(late or {rank for each in missing for rank in each})
        self._failed(
            f"The snapshot {name} has no copies on other machines, because {self.places.named(ranks)} did "
            "not answer in time. Training goes on, and the next one is tried."
        )
