"""What the samples of a dataset are like: their sizes, the batches that they become, the worst of them.

Every kind of recipe has its rows; those of supervised finetuning are here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from torchtune_adaptive.common import counted
from torchtune_adaptive.recipe.data.few_lengths import FewLengths, Length
from torchtune_adaptive.recipe.data.packed import ImaginedMask, collate_packed
from torchtune_adaptive.recipe.data.split_rows import CollateParts, RowParts
from torchtune_adaptive.recipe.registry import component
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.upstream import labels_are_shifted

Row = dict[str, Any]
Collate = Callable[[list[Row]], dict[str, Any]]
_CAN_BE_PADDED = {"tokens", "labels", "encoder_input", "encoder_mask"}
"""The keys of batches that can be padded."""


@dataclass(frozen=True)
class RowSize:
    """What decides the memory that a row takes. Batches pad each part to the largest of any of their rows."""

    tokens: int
    images: int = 0
    tiles: int = 0
    """Tiles of the image that has the most."""

    def __str__(self) -> str:
        if not self.images:
            return f"{self.tokens} tokens"
        images = counted(self.images, "image")
        return f"{self.tokens} tokens and {images} of {counted(self.tiles, 'tile')}"


def images_of(row: Row) -> list[torch.Tensor]:
    """The images of a row as torchtune's vision transforms give them: tiles, channels, height, width."""
    encoder_input = row.get("encoder_input")
    return list(encoder_input["images"]) if isinstance(encoder_input, Mapping) else []


def with_images(row: Row, like: Row, images: int, tiles: int) -> Row:
    """A row with a number of images, each with the same number of tiles: the text is that of ``row``, and the
    images are copies, cut or repeated, of the largest of the row ``like``."""
    at = max(range(len(images_of(like))), key=lambda i: len(images_of(like)[i]))
    image, mask = images_of(like)[at], like["encoder_mask"][at]
    aspect = like["encoder_input"]["aspect_ratio"][at]
    tokens_per_tile = mask.shape[1] // len(image)
    if len(image) != tiles:
        copies = -(-tiles // len(image))
        image = image.repeat(copies, *[1] * (image.dim() - 1))[:tiles]
        aspect = torch.tensor([1, tiles]).to(aspect)
    seen = mask.new_ones(len(row["tokens"]), tiles * tokens_per_tile)
    return {
        **row,
        "encoder_input": {"images": [image] * images, "aspect_ratio": [aspect] * images},
        "encoder_mask": [seen] * images,
    }


class Rows(ABC):
    """The samples of one kind of recipe. Batches are dictionaries with ``tokens`` and ``labels``."""

    sample: ClassVar[str] = "row"
    """What one of them is called."""
    sequences: ClassVar[int] = 1
    """The sequences of each; a batch has the first ones of all samples, then the second ones."""
    keys: ClassVar[tuple[str, ...]] = ("tokens", "labels")
    """The keys that a row must have."""
    packed: bool = False
    """Whether they are packed: each has several documents, and is full."""

    @abstractmethod
    def length(self, row: Row) -> int:
        """How many tokens it has; of several sequences, the longest counts."""

    def padded(self, length: Length) -> Length:
        """The length of a batch whose longest row has so many tokens; of several, those of each."""
        return length

    def size(self, row: Row) -> RowSize:
        """All that decides the memory that it takes."""
        images = images_of(row)
        return RowSize(self.length(row), len(images), max(map(len, images), default=0))

    @abstractmethod
    def stretched(self, row: Row, length: int) -> Row:
        """A row cut or repeated to ``length`` tokens, in everything that goes with its tokens.

        No token is masked, so that a trial always has something to train on.
        """

    @abstractmethod
    def collate(self, asked: Asked, tokenizer: Any, objective: Any) -> Collate:
        """How rows become a batch for an objective."""

    @abstractmethod
    def imagined(self, rows: int, length: int, simulated: bool) -> dict[str, Any]:
        """A batch on the host like those of the collate function, without values, of some rows of a length;
        ``simulated`` for the simulated device."""


@dataclass(frozen=True)
class TokenRows(Rows):
    """Rows of tokens and their labels, packed or not, on one rank or split over several."""

    packed: bool = False
    parts: RowParts | None = None
    lengths: FewLengths | None = None
    """Those that batches have, where each would have its collectives recorded."""

    def length(self, row: Row) -> int:
        return len(row["tokens"])

    def padded(self, length: Length) -> Length:
        length = self.lengths.padded(length) if self.lengths else length
        return self.parts.padded(length) if self.parts else length

    def stretched(self, row: Row, length: int) -> Row:
        tokens = len(row["tokens"])

        def stretch(value: Any) -> Any:
            copies = -(-length // tokens)
            if isinstance(value, torch.Tensor) and value.shape == (tokens,):
                return value.repeat(copies)[:length]
            if isinstance(value, (list, tuple)) and len(value) == tokens:
                return (list(value) * copies)[:length]
            return value

        long = {name: stretch(value) for name, value in row.items() if name != "encoder_mask"}
        if "encoder_mask" in row:
            long["encoder_mask"] = [
                mask.new_ones(length, mask.shape[1]) for mask in row["encoder_mask"]
            ]
        # What is predicted does not matter, but it must be in the vocabulary: not every token is. An image's
        # has an embedding, but no logit.
        is_tensor = isinstance(long["tokens"], torch.Tensor)
        labels = torch.zeros_like(long["tokens"]) if is_tensor else [0] * length
        return {**long, "labels": labels}

    def collate(self, asked: Asked, tokenizer: Any, objective: Any) -> Collate:
        if self.packed:
            return collate_packed
        collate = partial(
            component(asked["collate_fn"]),
            padding_idx=tokenizer.pad_id,
            ignore_idx=objective.ignored,
        )
        chunks, parts = objective.output_chunks, self.parts
        end = tokenizer.pad_id, objective.ignored
        if chunks > 1 and "output" in (asked["custom_sharded_layers"] or []):
            least = (chunks * (chunks - 1) + 1) * (parts.ranks if parts else 1)
            # The output layer runs once for each chunk and, sharded by itself, gathers its weights each
            # time. Short batches give fewer chunks, so ranks with batches of other lengths would wait for
            # each other forever.
            collate = partial(collate_padded, collate, partial(max, least), *end)
        if self.lengths:
            collate = partial(collate_few, collate, self.lengths, *end)
        return CollateParts(collate, parts, *end, labels_are_shifted()) if parts else collate

    def imagined(self, rows: int, length: int, simulated: bool) -> dict[str, Any]:
        """A batch; the mask of packed rows is dense on a CPU, and a few kilobytes on a GPU."""
        names = ("tokens", "labels", "input_pos") if self.packed else ("tokens", "labels")
        batch: dict[str, Any] = {
            name: torch.empty((rows, length), dtype=torch.int64) for name in names
        }
        if self.packed and simulated:
            batch["mask"] = ImaginedMask(rows, length)
        return batch


TOKEN_ROWS = TokenRows()


def collate_padded(
    collate: Collate, padded: Callable[[int], int], padding: int, ignored: int, rows: list[Row]
) -> dict[str, Any]:
    """A batch of rows, padded to the length that ``padded`` gives for theirs. What the model sees of the rows
    does not change: what is added comes after them, and is not trained on."""
    batch = collate(rows)
    missing = padded(batch["tokens"].shape[-1]) - batch["tokens"].shape[-1]
    if missing > 0:
        batch["tokens"] = F.pad(batch["tokens"], (0, missing), value=padding)
        batch["labels"] = F.pad(batch["labels"], (0, missing), value=ignored)
        if "encoder_mask" in batch:
            batch["encoder_mask"] = F.pad(batch["encoder_mask"], (0, 0, 0, missing))
    return batch


def collate_few(
    collate: Collate, lengths: FewLengths, padding: int, ignored: int, rows: list[Row]
) -> dict[str, Any]:
    """A batch of one of few lengths, if it has nothing but what is known: a user's own collate function may
    make masks as well."""
    batch = collate(rows)
    if batch.keys() - _CAN_BE_PADDED:
        return batch
    return collate_padded(lambda _: batch, lengths.padded, padding, ignored, rows)
