"""Packed rows, a device that has no room for the mask of many, and flex attention on a CPU."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.compiler.config
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as attention
from torchtune.modules import attention_utils
from torchtune.utils import _device, _import_guard

from tests.helpers.decoder import VOCABULARY
from torchtune_adaptive.recipe.data import packed
from torchtune_adaptive.recipe.setup import flex_attention as product


def packs(rows: int, length: int = 12, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Packed rows of three documents each, which end elsewhere in each row."""
    numbers = torch.Generator().manual_seed(seed)
    found = []
    for row in range(rows):
        first = 1 + row % (length - 2)
        lengths = [first, 1, length - first - 1]
        tokens = torch.randint(0, VOCABULARY, (length,), generator=numbers)
        positions = torch.cat([torch.arange(each) for each in lengths])
        found.append(
            {
                "tokens": tokens,
                "labels": tokens.clone(),
                "input_pos": positions,
                "seq_lens": torch.tensor(lengths),
            }
        )
    return found


@contextmanager
def room_for_masks_of(rows: int) -> Iterator[None]:
    """A device on which a mask of more rows does not fit."""
    make = attention_utils.create_block_causal_mask

    def made_if_it_fits(seq_lens: list[torch.Tensor]) -> torch.Tensor:
        if len(seq_lens) > rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory: a mask of {len(seq_lens)} rows")
        return make(seq_lens)

    with patch.object(attention_utils, "create_block_causal_mask", made_if_it_fits):
        yield


class _StaysHere(torch.Tensor):
    """A tensor on the CPU, wherever it is asked to go."""

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any
) -> torch.Tensor:
    """Flex attention, and a stand-in for its backward pass, which it does not have on a CPU."""
    rows, positions = torch.arange(len(query)), torch.arange(query.shape[2])
    seen = block_mask.mask_mod(rows[:, None, None], 0, positions[:, None], positions)
    dense = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
    flex = attention(query.detach(), key.detach(), value.detach(), block_mask=block_mask)
    assert isinstance(flex, torch.Tensor)
    return torch.where(torch.isclose(flex, dense, rtol=1e-4, atol=1e-5), dense, torch.nan)


@contextmanager
def flex_attention() -> Iterator[None]:
    """torchtune as it is imported where there is a GPU, but on the CPU: models that are built here use flex
    attention. Afterwards, the limit of compilations is what it was."""
    before = dict(vars(attention_utils))
    with (
        warnings.catch_warnings(),
        patch.object(_import_guard, "_SUPPORTS_FLEX_ATTENTION", True),
        patch.multiple(_device, _SUPPORTS_FLEX_ATTENTION=True, BlockMask=BlockMask),
        torch.compiler.config.patch(recompile_limit=torch.compiler.config.recompile_limit),
        patch.object(packed, "has_flex_attention", lambda device: True),
        patch.object(product, "has_flex_attention", lambda device: True),
    ):
        torch.compiler.reset()
        # Dynamo looks at it, and torch warns of its own look.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        try:
            importlib.reload(attention_utils)
            documents = attention_utils._get_document_ids_from_seq_lens
            on_cpu = {
                "_get_document_ids_from_seq_lens": lambda of: documents(of).as_subclass(_StaysHere),
                "create_block_causal_mask_flex": lambda *of, device: create_block_mask(
                    *of, device="cpu"
                ),
                "flex_attention_compiled": torch.compile(
                    _dense_attention, dynamic=False, backend="eager"
                ),
            }
            vars(attention_utils).update(on_cpu)
            yield
        finally:
            vars(attention_utils).clear()
            vars(attention_utils).update(before)
            torch.compiler.reset()
