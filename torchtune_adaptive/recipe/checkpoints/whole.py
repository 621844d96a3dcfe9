"""Which snapshot a run resumes from: the newest of which each file is somewhere, as it was written.

Where machines have folders of their own, each has a part. A rank reads what it needs of the others in a
folder beside, with links to what is here and copies of what is fetched.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtune_adaptive.common import CheckpointError, Damaged, Manifest, durable
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.recipe.checkpoints.all_or_none import LONGEST_SAVE, AllOrNone, reason
from torchtune_adaptive.recipe.checkpoints.folder import (
    OF_ALL,
    TORCH_METADATA,
    Checkpoint,
    CheckpointFolder,
    Since,
)
from torchtune_adaptive.recipe.checkpoints.places import Places
from torchtune_adaptive.recipe.checkpoints.transfer import NoAnswer, Sent, exchange

_VIEW = ".view"
_PARTS = ".distcp"
"""How the names of torch's files end that hold tensors. The others are small."""


@dataclass(frozen=True)
class _Snapshot:
    """A snapshot, as the first rank of each place has it."""

    name: str
    manifest: Manifest
    """The facts of all, and all files that are somewhere."""
    at: Mapping[int, Manifest]
    """By the first rank of a place, what is there."""

    @property
    def names(self) -> list[str]:
        """The files that it was taken with."""
        return list(self.manifest.facts.get(OF_ALL, self.manifest.files))

    def holders(self, name: str) -> list[int]:
        return [leader for leader, manifest in self.at.items() if name in manifest.files]


class WholeSnapshots:
    """Finds the newest whole snapshot of a folder, and reads it. All ranks call all of it."""

    def __init__(self, folder: CheckpointFolder, places: Places, everyone: AllOrNone) -> None:
        self._folder = folder
        self._places = places
        self._all = everyone
        self._found: _Snapshot | None = None
        self._view = folder.path / _VIEW

    def newest(self, checkpoint: str | None) -> Since:
        """The newest whole snapshot that was taken since a checkpoint; see ``CheckpointFolder.since``."""
        listed, skipped = self._listed(checkpoint)
        for each in sorted(listed, key=lambda one: -int(one.manifest.facts.get("number", 0))):
            try:
                self._found = self._verified(each)
                self._open(self._found)
            except CheckpointError as problem:
                skipped.append(f"the snapshot {each.name} ({problem})")
                self._found = None
                continue
            found = Checkpoint(self._folder.path / each.name, each.manifest, is_verified=True)
            return Since(found, skipped)
        return Since(skipped=skipped)

    def folder_of(self, checkpoint: str | None) -> Path | None:
        """The folder in which this rank reads the snapshot that was found, if it has this id."""
        found = self._found
        if found is None or found.manifest.facts["id"] != checkpoint:
            return None
        return self._view if self._is_scattered(found) else self._path(found)

    def fetch(self, names: Collection[str], ranks: Ranks) -> None:
        """Get the files that this rank reads, and that are not on this machine.

        Raises:
            CheckpointError: on all ranks, if that is not possible.
        """
        found, group = self._found, ranks.group
        if found is None or not self._is_scattered(found) or group is None:
            return
        everyones = ranks.gather(
            [name for name in sorted(names) if not (self._view / name).exists()]
        )
        targets = dict[tuple[str, int], int]()  # one rank of each place gets a file
        for rank, wanted in enumerate(everyones):
            for name in wanted:
                targets.setdefault((name, self._places.firsts[rank]), rank)
        files = []
        for number, ((name, _), target) in enumerate(sorted(targets.items())):
            size, checksum = found.manifest.files[name]
            holders = found.holders(name)
            there = self._places.beside(holders[number % len(holders)])
            files.append(Sent(name, size, checksum, there[number % len(there)], target))
        problem: Exception | None = None
        try:
            arrived = exchange(files, group, self._view, self._view, LONGEST_SAVE)
            mine = {each.name for each in files if each.target == self._places.rank}
            if lacking := sorted(mine - arrived):
                problem = CheckpointError(f"{lacking[0]} could not be written to {self._view}")
        except NoAnswer as error:
            problem = CheckpointError(f"{self._places.named([error.rank])} did not send its part")
        AllOrNone(ranks).raise_if_any(problem, str)

    def close(self) -> None:
        """Remove what was fetched, once it has been read."""
        if self._places.is_leader:
            shutil.rmtree(self._view, ignore_errors=True)

    def _path(self, found: _Snapshot) -> Path:
        return self._folder.path / found.name

    def _is_scattered(self, found: _Snapshot) -> bool:
        """Whether a place lacks a file of it."""
        return any(
            leader not in found.at or not {*found.names} <= found.at[leader].files.keys()
            for leader in self._places.leaders
        )

    # --- which are whole ------------------------------------------------------------------------------

    def _listed(self, checkpoint: str | None) -> tuple[list[_Snapshot], list[str]]:
        """The snapshots that are anywhere, and what was not finished."""
        own, skipped = dict[str, Manifest](), list[str]()
        if self._places.is_leader:
            try:
                for each in self._folder.since(checkpoint, skipped):
                    if each.manifest is not None:
                        own[each.name] = each.manifest
            except OSError as error:
                skipped.append(f"snapshots in {self._folder.path} ({reason(error)})")
        everyones = self._all.gather((own, skipped))
        found = dict[str, _Snapshot]()
        for rank, (of_rank, _) in enumerate(everyones):
            for name, manifest in of_rank.items():
                known = found.get(manifest.facts["id"])
                files = {**(known.manifest.files if known else {}), **manifest.files}
                at = {**(known.at if known else {}), rank: manifest}
                found[manifest.facts["id"]] = _Snapshot(name, Manifest(manifest.facts, files), at)
        return [*found.values()], [*dict.fromkeys(line for _, lines in everyones for line in lines)]

    def _verified(self, snapshot: _Snapshot) -> _Snapshot:
        """The same without the files that are damaged; each rank reads its share of those on its machine.

        Raises:
            CheckpointError: on all ranks, if not all of its files are left.
        """
        leader = self._places.firsts[self._places.rank]
        bad = dict[str, str]()
        if (here := snapshot.at.get(leader)) is not None:
            beside = self._places.beside(leader)
            share = sorted(here.files)[beside.index(self._places.rank) :: len(beside)]
            bad = _damaged(self._path(snapshot), here, share)
        everyones = self._all.gather(bad)
        at = {}
        for first, manifest in snapshot.at.items():
            lost = {name for rank in self._places.beside(first) for name in everyones[rank]}
            files = {name: of for name, of in manifest.files.items() if name not in lost}
            at[first] = Manifest(manifest.facts, files)
        left = _Snapshot(snapshot.name, snapshot.manifest, at)
        problems = {name: problem for each in everyones for name, problem in each.items()}
        if TORCH_METADATA not in snapshot.names:
            raise CheckpointError(f"it lists no {TORCH_METADATA}")
        for name in snapshot.names:
            if not left.holders(name):
                raise CheckpointError(problems.get(name, f"{name} is on no machine"))
        return left

    def _open(self, found: _Snapshot) -> None:
        """Make the folder in which all files are read that are here, and the small ones of others.

        Raises:
            CheckpointError: on all ranks, if there is no room for it.
        """
        if not self._is_scattered(found):
            return
        small = [name for name in found.names if not name.endswith(_PARTS)]
        contents = dict[str, bytes]()
        with self._all.together(reason):
            if self._places.is_leader:
                self._link(found)
            for name in small:
                if self._places.rank == found.holders(name)[0]:
                    contents[name] = (self._path(found) / name).read_bytes()
        everyones = self._all.gather(contents)
        with self._all.together(reason):
            if self._places.is_leader:
                self._write(everyones)

    def _link(self, found: _Snapshot) -> None:
        shutil.rmtree(self._view, ignore_errors=True)
        self._view.mkdir(parents=True)
        here = found.at.get(self._places.rank)
        for name in here.files if here is not None else ():
            (self._view / name).symlink_to(self._path(found) / name)

    def _write(self, contents: Sequence[Mapping[str, bytes]]) -> None:
        for each in contents:
            for name, content in each.items():
                if not (self._view / name).exists():
                    (self._view / name).write_bytes(content)


def _damaged(folder: Path, manifest: Manifest, names: list[str]) -> dict[str, str]:
    """Those of some files that are not as they were written, with the reason."""
    problems, complete = dict[str, str](), []
    for name in names:
        try:
            durable.check_sizes(folder, manifest, [name])
            complete.append(name)
        except Damaged as damage:
            problems[name] = str(damage)
    return problems | durable.damaged(folder, manifest, complete)
