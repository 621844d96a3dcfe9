"""The images of a traced batch, in the shapes that a model with cross-attention to images takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtune.modules.model_fusion import FusionEmbedding

_aten = torch.ops.aten
PER_ROW = 1
"""Number of images of a traced row."""


@dataclass(frozen=True)
class Images:
    """The shape of a row's images: as many tiles as the model can take.

    Args:
        tiles: the number of tiles of an image.
        channels: the number of channels of a tile.
        width: the pixels on a side of a tile, which is a square.
        tokens_per_tile: the number of tokens that the text attends to.
    """

    tiles: int
    channels: int
    width: int
    tokens_per_tile: int

    @classmethod
    def of(cls, model: nn.Module) -> Images | None:
        """The images that a model of torchtune takes (Llama 3.2 Vision); None if it takes none."""
        encoder = getattr(getattr(model, "encoder", None), "clip", None)
        if encoder is None:
            return None
        patch = encoder.conv.kernel_size[0]
        return cls(
            tiles=len(encoder.pre_tile_pos_embed.embedding),
            channels=encoder.conv.in_channels,
            width=math.isqrt(encoder.patches_per_tile) * patch,
            tokens_per_tile=encoder.get_image_tokens_per_tile(),
        )

    def batch(self, rows: int, length: int) -> dict[str, Any]:
        """The additions of ``padded_collate_tiled_images_and_mask`` to a batch of text."""
        shape = (rows, PER_ROW, self.tiles, self.channels, self.width, self.width)
        images = torch.empty(shape, dtype=torch.bfloat16)  # as torchtune's transform has them
        aspect_ratio = torch.empty((rows, PER_ROW, 2), dtype=torch.int64)
        tokens = PER_ROW * self.tiles * self.tokens_per_tile
        mask = torch.empty((rows, length, tokens), dtype=torch.bool)
        return {
            "encoder_input": {"images": images, "aspect_ratio": aspect_ratio},
            "encoder_mask": mask,
        }

    def prepare(self, model: nn.Module, replaced: dict[Any, Callable[..., Any]]) -> None:
        """Let a model be traced although shapes in it depend on values, which fake tensors do not have: its
        embeddings of tiles read how an image is tiled, the one of tokens separates text from images.
        Operations are ``replaced`` for that."""
        height = max(n for n in range(1, math.isqrt(self.tiles) + 1) if self.tiles % n == 0)
        clip: Any = model.encoder.clip
        tiled = (clip.pre_tile_pos_embed, clip.post_tile_pos_embed, clip.token_pos_embedding)
        for embedding in tiled:
            embedding.forward = _with(embedding.forward, (height, self.tiles // height))
        selected: list[int] = []

        def select(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            rows, length = inputs[0].shape
            selected.extend((rows * (length - PER_ROW), rows * PER_ROW))  # text, then images

        for module in model.modules():
            if isinstance(module, FusionEmbedding):
                module.register_forward_pre_hook(select)
        replaced[_aten.masked_select.default] = lambda values, _: values.new_empty(selected.pop(0))
        replaced[_aten.masked_scatter_backward.default] = lambda values, _, shape: values.new_empty(
            shape
        )


def _with(forward: Callable[..., Any], tiling: tuple[int, int]) -> Callable[..., Any]:
    return lambda x, _: forward(x, [tiling] * len(x))
