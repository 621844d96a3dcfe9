"""Models of transformers whose modules compute by Liger's kernels (0.8.5), as far as memory goes.

``liger_choices`` says which are chosen, ``liger_kernels`` has the kernels. Here is what transformers, Axolotl
and LLaMA-Factory let Liger replace.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.library.liger_choices import (
    HEAD,
    IN_PLACE,
    LOSS,
    OWN_LOSS,
    chosen_kernels,
)
from torchtune_adaptive.library.liger_kernels import (
    GatedProduct,
    Norm,
    head_loss,
    logits_loss,
    rotated,
)
from torchtune_adaptive.library.private import layers_of


def apply_liger(
    model: Any,
    switches: Mapping[str, bool] | None,
    has_head: bool,
    half: torch.dtype | None,
) -> None:
    """Let modules of a model compute by Liger's kernels.

    Args:
        model: one whose type is planned.
        switches: ``liger_kernel_config``, the kernels that are on or off.
        has_head: whether the trainer has a head of its own, so that Liger has none.
        half: the type that mixed precision computes in, if there is any.
    """
    kind = model.config.model_type
    chosen = chosen_kernels(kind, switches, has_head)
    if chosen["rope"]:
        rotate(model)
    if chosen["rms_norm"]:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_norm, module, IN_PLACE[kind])
    if chosen["swiglu"] or chosen["geglu"]:
        for layer in layers_of(model):
            mlp: Any = layer.mlp
            mlp.forward = partial(_gated, mlp)
    if chosen[HEAD]:
        model.forward = partial(_without_logits, model, half)
    if chosen[LOSS] and kind not in OWN_LOSS:
        model.loss_function = logits_loss


def rotate(model: Any) -> None:
    """Let the attention of a model rotate queries and keys by Liger's kernel."""
    for layer in layers_of(model):
        attention: Any = layer.self_attn
        _Rotating(sys.modules[type(attention).__module__], attention)


class _Rotating:
    """Puts Liger's function in the place of its module's own, as long as an attention runs."""

    _NAME = "apply_rotary_pos_emb"

    def __init__(self, source: Any, attention: nn.Module) -> None:
        self._source = source
        self._own = getattr(source, self._NAME)
        # Not around the step: backward runs layers again, and other models have the same module.
        attention.register_forward_pre_hook(self._begin)
        attention.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        setattr(self._source, self._NAME, rotated)

    def _end(self, *_: Any) -> None:
        setattr(self._source, self._NAME, self._own)


def _norm(module: Any, in_place: bool, inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Norm.apply(inputs, module.weight, in_place)
    return found


def _gated(mlp: Any, inputs: torch.Tensor) -> torch.Tensor:
    if hasattr(mlp, "gate_up_proj"):
        gate, up = mlp.gate_up_proj(inputs).chunk(2, dim=-1)
    else:
        gate, up = mlp.gate_proj(inputs), mlp.up_proj(inputs)
    found: torch.Tensor = mlp.down_proj(GatedProduct.apply(gate, up))
    return found


def _without_logits(
    model: Any, half: torch.dtype | None, *, labels: torch.Tensor, **inputs: Any
) -> Any:
    hidden = model.base_model(**inputs)[0]
    loss = head_loss(hidden, model.get_output_embeddings().weight, labels, half)
    return SimpleNamespace(loss=loss, logits=None)
