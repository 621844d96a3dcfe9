"""Whole weights in the usual format, of whose files several ranks write some each.

torchtune converts the weights of a layer together, and each layer alone. So a file has whole layers, and the
rank that writes it needs no others.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtune import training

from torchtune_adaptive.common import durable, saving_through
from torchtune_adaptive.recipe import private
from torchtune_adaptive.recipe.checkpoints.all_or_none import AllOrNone
from torchtune_adaptive.recipe.checkpoints.gathering import weights_in_files
from torchtune_adaptive.recipe.checkpoints.weights import Weights

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
        found = _LAYER.match(name)
        layers.setdefault(found[0] if found else "", []).append(name)
    total, before, dealt = sum(sizes.values()), 0, dict[str, int]()
    numbers = {0: 0}  # without the files that no layer falls into
    for layer, names in layers.items():
        own = sum(sizes[name] for name in names)
        middle = before + own / 2
        at = min(int(middle * files / total), files - 1) if layer else 0
        number = numbers.setdefault(at, len(numbers))
        dealt |= dict.fromkeys(names, number)
        before += own
    return dealt


class WeightFiles:
    """Writes whole weights: each file is gathered and written by one rank, on as many machines as there are.

    Args:
        checkpointer: torchtune's. Where it cannot write several files, rank 0 has all weights in one.
        whole: which weights are saved, and how.
        weights: those of the model, of which each rank may have a part.
    """

    def __init__(
        self, all_or_none: AllOrNone, checkpointer: Any, whole: Weights, weights: dict[str, Any]
    ) -> None:
        self._all = all_or_none
        self._checkpointer = checkpointer
        self._whole = whole
        self._adapters = whole.adapters(weights).get(training.ADAPTER_KEY, {})
        self._weights = self._adapters if whole.adapters_only else weights
        files = 1 if whole.adapters_only else private.files_of_weights(checkpointer)
        self._file = deal({name: one.nbytes for name, one in self._weights.items()}, files)
        self.count = 1 + max(self._file.values())

    def gather(
        self, device: torch.device, folder: Path, describe: Describe
    ) -> dict[str, torch.Tensor]:
        """The weights of this rank's files; on rank 0 all adapters, too.

        Args:
            folder: the folder where files hold them, on a filesystem with room.

        Raises:
            CheckpointError: on all ranks, if one has no room.
        """
        is_zero = self._all.ranks.is_zero

        def keeps(name: str) -> bool:
            return self._is_own(self._file[name]) or (is_zero and name in self._adapters)

        with self._all.together(describe):
            return weights_in_files(self._weights, keeps, device, folder)

    def write(self, folder: Path, gathered: dict[str, torch.Tensor], describe: Describe) -> Written:
        """Write all files into the staged folder of a checkpoint; what all ranks have written.

        Args:
            gathered: the weights that this rank has; those that are written are taken out of it.

        Raises:
            CheckpointError: on all ranks, if one of them could not.
        """
        mine = Written()
        adapters = self._whole.adapters(gathered)
        with self._all.together(describe, Exception):
            for file in filter(self._is_own, range(self.count)):
                own = {n: gathered.pop(n) for n, number in self._file.items() if number == file}
                parts = {training.MODEL_KEY: self._whole.merged(own)}
                mine.add(self._write_one(folder, parts if file else {**parts, **adapters}, file))
        written = Written()
        for each in self._all.gather(mine):
            written.add(each)
        return written

    def _is_own(self, file: int) -> bool:
        ranks = self._all.ranks
        return file * ranks.size // self.count == ranks.rank

    def _write_one(self, folder: Path, parts: dict[str, Any], file: int) -> Written:
        """Write a file; with the first one, what else is in a checkpoint."""
        beside, epoch = folder / f".{file}", folder.name.removeprefix("epoch_")
        checkpointer = private.writing_one_file(self._checkpointer, beside)
        writer = durable.Writer()
        with saving_through(writer.create):
            checkpointer.save_checkpoint(parts, epoch=epoch)
        staged = beside / folder.name
        [index] = staged.glob(_INDEX)
        content = json.loads(index.read_text())
        [alone] = set(content["weight_map"].values())
        name = alone.replace("00001-of-00001", f"{file + 1:05}-of-{self.count:05}")
        here = [(staged / alone).rename(folder / name)]
        for each in staged.iterdir() if file == 0 else ():
            here.append(each.rename(folder / each.name))
        shutil.rmtree(beside)
        return Written(
            writer.files(folder, here),
            dict.fromkeys(content["weight_map"], name),
            content["metadata"]["total_size"],
        )


@dataclass
class Written:
    """Files of weights that are on disk."""

    files: durable.Files = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """The file of each weight, by Hugging Face's name for it."""
    size: int = 0
    """The bytes of the weights."""

    def add(self, other: Written) -> None:
        self.files |= other.files
        self.places |= other.places
        self.size += other.size

    def write_index(self, folder: Path) -> None:
        """Write the index of all files, in place of the first one's."""
        [index] = folder.glob(_INDEX)
        content = {"metadata": {"total_size": self.size}, "weight_map": self.places}
        index.write_text(json.dumps(content, indent=2))
