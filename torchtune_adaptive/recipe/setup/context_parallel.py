"""Context parallelism: each rank has a part of each row, and attention lets it see the whole row.

torch replaces ``scaled_dot_product_attention`` for it, in forward and in backward. A run does so once, for as
long as it lasts, and splits its rows by itself, on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.data.split_rows import RowParts
from torchtune_adaptive.recipe.private import rotate_context_by
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.keys import CONTEXT, ROTATION
from torchtune_adaptive.recipe.setup.environment import Context, Environment
from torchtune_adaptive.recipe.setup.meshes import context_mesh

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""Those that torch's context parallelism knows."""


@contextmanager
def attention_over_parts(asked: Asked, environment: Environment) -> Iterator[Context | None]:
    """A context in which attention sees whole rows, although each rank has a part of them; with None if the
    config does not ask for it.

    Raises:
        ConfigError: this cannot be done on so many ranks, or on this device.
    """
    ranks = asked.contexts
    if ranks == 1:
        yield None
        return
    mesh, device = context_mesh(asked, environment), environment.device
    rotate_context_by(asked[ROTATION])
    # torch splits what it is given, in the same way as attention takes it: this tells which pieces are here.
    pieces = torch.arange(2 * ranks, device=device)
    with sdpa_kernel(_KERNELS), context_parallel(mesh, buffers=[pieces], buffer_seq_dims=[0]):
        mine = tuple(pieces.tolist())
        _try(device, environment.dtype)
        multiple = len(mine) * ranks * asked.holders * shortest_piece(device, environment.dtype)
        yield Context(RowParts(ranks, mine, multiple), mesh.get_group())


def shortest_piece(device: torch.device, dtype: torch.dtype) -> int:
    """The tokens in the shortest piece of a row that attention can take; others have a multiple of it.

    On a GPU, fp32 goes through efficient attention. It pads its sums to a multiple of 32 tokens
    (``kAlignLSE`` in torch's sources), and torch cuts them in halves as it cuts the tokens.
    """
    return 1 if device.type == "cpu" or dtype is torch.bfloat16 else 32


def _try(device: torch.device, dtype: torch.dtype) -> None:
    """Attend once, so that a device for which torch cannot do it is refused, by ``ConfigError``, before a
    model loads."""
    row = torch.zeros(1, 1, 2 * shortest_piece(device, dtype), 64, device=device, dtype=dtype)
    try:
        F.scaled_dot_product_attention(row, row, row, is_causal=True)
    except RuntimeError as error:
        raise ConfigError(
            "device",
            device.type,
            f"has no attention that torch can split by {CONTEXT}: {str(error).rstrip('.')}",
            f"Use a GPU with flash attention, or set {CONTEXT}=1",
        ) from error


def prepare_for_parts(model: nn.Module, parts: RowParts) -> None:
    """Prepare a model to be trained on parts of rows: check that nothing but torch's attention uses several
    tokens of a row, and let the model check the length of whole rows.

    Raises:
        ConfigError: naming what of it cannot.
    """
    if not isinstance(model, TransformerDecoder):
        reason = f"splits rows of text, and the model is a {type(model).__name__}"
        raise ConfigError(CONTEXT, parts.ranks, reason, f"Set {CONTEXT}=1")
    for number, layer in enumerate(model.layers):
        attention: Any = getattr(layer, "attn", None)
        if type(attention) is not MultiHeadAttention or not attention.is_causal:
            what = f"{type(attention).__name__}, which attends in a way of its own"
        elif getattr(layer, "mask_mod", None) is not None:
            what = "a mask of its own"
        elif attention.attn_dropout > 0:
            what = "attention with dropout"
        else:
            continue
        reason = f"splits causal attention without masks and dropout, and layer {number} has {what}"
        raise ConfigError(CONTEXT, parts.ranks, reason, f"Set {CONTEXT}=1")
    # Its own check sees the length of a part; positions that it does not have would end a kernel.
    model.register_forward_pre_hook(partial(_require_known_positions, parts), with_kwargs=True)


def _require_known_positions(
    parts: RowParts, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    tokens = named["tokens"] if "tokens" in named else arguments[0]
    length, longest = tokens.shape[1] * parts.ranks, cast(int, model.max_seq_len)
    if length > longest:
        reason = f"pads rows to {length} tokens, and the model takes {longest}"
        remedy = f"Set tokenizer.max_seq_len to {longest - longest % parts.multiple} or less"
        raise ConfigError(CONTEXT, parts.ranks, reason, remedy)
