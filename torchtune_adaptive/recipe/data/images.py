"""A row's size: its tokens and, in rows with images, the images and their tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchtune_adaptive.common import counted

Row = dict[str, Any]


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
    """A row with a number of images, each with the same number of tiles.

    Args:
        row: the row whose text is taken.
        like: a row with an image, of which a copy is cut or repeated.
        images: the number of images that the row gets.
        tiles: the number of tiles that each of them has.
    """
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
