"""Whole weights in the usual format, of whose files several ranks write some each.

torchtune converts the weights of a layer together, and each layer alone. So a file has whole layers, and the
rank that writes it needs no others.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchtune_adaptive.common import durable
from torchtune_adaptive.recipe import private
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone
from torchtune_adaptive.recipe.checkpoints.folder import CheckpointFolder
from torchtune_adaptive.recipe.checkpoints.gathering import weights_in_files

Describe = Callable[[BaseException], str]
"""Function that says why a checkpoint could not be written."""
_LAYER = re.compile(r".*?\blayers\.\d+\.")
_INDEX = "*.index.json"


def deal(sizes: Mapping[str, int], files: int) -> dict[str, int]:
    """The number of the file of each weight, from 0 on, by its name.

    Layers stay whole and in order, and files are about equal in bytes. What belongs to no layer is in the
    first one.

    Args:
        sizes: the bytes of weights, by torchtune's names for them.
        files: the most files; there are fewer where there are not as many layers.
    """
    layers: dict[str, list[str]] = {"": []}
    for name in sizes:
        layer = _LAYER.match(name)
        layers.setdefault(layer[0] if layer else "", []).append(name)
    total, before, dealt = sum(sizes.values()), 0, dict[str, int]()
    numbers: dict[int, int] = {0: 0}
    for names in layers.values():
        own = sum(sizes[name] for name in names)
        at = min((2 * before + own) * files // (2 * max(total, 1)), files - 1) if before else 0
        number = numbers.setdefault(at, len(numbers))
        dealt |= dict.fromkeys(names, number)
        before += own
    return dealt


class WeightFiles:
    """Writes whole weights: each file is gathered and written by one rank, on as many machines as there are.

    Args:
        checkpointer: torchtune's.
        several: whether it may write several files; else rank 0 has all weights in one.
        weights: those of the model, of which each rank may have a part.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        all_or_none: AllOrNone,
        checkpointer: Any,
        several: bool,
        weights: Mapping[str, Any],
    ) -> None:
        self._folder = folder
        self._all = all_or_none
        self._checkpointer = checkpointer
        self._weights = weights
        files = private.files_of_weights(checkpointer) if several else 1
        self._file = deal({name: one.nbytes for name, one in weights.items()}, files)
        self.count = 1 + max(self._file.values())

    def gather(
        self, device: torch.device, on_rank_zero: Collection[str], describe: Describe
    ) -> dict[str, torch.Tensor]:
        """The weights of this rank's files; on rank 0 also those of the names ``on_rank_zero``.

        Raises:
            CheckpointError: on all ranks, if one has no room.
        """
        ranks, staging = self._all.ranks, self._folder.staging

        def keeps(name: str) -> bool:
            return self._is_own(self._file[name]) or (ranks.is_zero and name in on_rank_zero)

        self._all.decide(lambda: staging.mkdir(parents=True, exist_ok=True))
        gathered, problem = dict[str, torch.Tensor](), None
        try:
            gathered = weights_in_files(self._weights, keeps, device, staging)
        except OSError as error:
            problem = error
        self._all.raise_if_any(problem, describe)
        return gathered

    def write(
        self, name: str, parts: Callable[[int], dict[str, Any]], describe: Describe
    ) -> durable.Files:
        """Write all files into the folder that has been begun for a checkpoint ``name``.

        Args:
            parts: function that gives what torchtune's checkpointer expects for the file of a number.

        Returns:
            On all ranks, what is on disk, for ``CheckpointFolder.publish``.

        Raises:
            CheckpointError: on all ranks, if one of them could not.
        """
        folder, mine, problem = self._folder.staging / name, _Written(), None
        try:
            for file in range(self.count):
                if self._is_own(file):
                    mine.add(self._write_one(folder, parts(file), file))
        except Exception as error:
            problem = error
        self._all.raise_if_any(problem, describe)
        everyones = _Written()
        for each in self._all.gather(mine):
            everyones.add(each)
        try:
            if self._all.ranks.is_zero:
                _write_index(folder, everyones)
        except OSError as error:
            problem = error
        self._all.raise_if_any(problem, describe)
        return everyones.files

    def of_file(self, number: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of a file, taken out of those that were gathered, so that memory is free after it."""
        return {name: weights.pop(name) for name, file in self._file.items() if file == number}

    def _is_own(self, file: int) -> bool:
        ranks = self._all.ranks
        return file * ranks.size // self.count == ranks.rank

    def _write_one(self, folder: Path, parts: dict[str, Any], file: int) -> _Written:
        """Write a file; with the first one, what else is in a checkpoint."""
        beside, epoch = folder / f".{file}", folder.name.removeprefix("epoch_")
        writer = private.writing_one_file(self._checkpointer, beside)
        writer.save_checkpoint(parts, epoch=epoch)
        staged = beside / folder.name
        [index] = staged.glob(_INDEX)
        content = json.loads(index.read_text())
        [alone] = set(content["weight_map"].values())
        name = alone.replace("00001-of-00001", f"{file + 1:05}-of-{self.count:05}")
        (staged / alone).rename(folder / name)
        for each in staged.iterdir() if file == 0 else ():
            each.rename(folder / each.name)
        shutil.rmtree(beside)
        return _Written(
            durable.flushed(folder, [folder / name]),
            dict.fromkeys(content["weight_map"], name),
            content["metadata"]["total_size"],
        )


@dataclass
class _Written:
    files: durable.Files = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """The file of each weight, by Hugging Face's name for it."""
    size: int = 0

    def add(self, other: _Written) -> None:
        self.files |= other.files
        self.places |= other.places
        self.size += other.size


def _write_index(folder: Path, written: _Written) -> None:
    """Write the index of all files, in place of the first one's."""
    [index] = folder.glob(_INDEX)
    content = {"metadata": {"total_size": written.size}, "weight_map": written.places}
    index.write_text(json.dumps(content, indent=2))
