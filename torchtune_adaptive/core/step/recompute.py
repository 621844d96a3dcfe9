"""Recomputation in backward of what forward does not keep, as switches on a model that is built.

Nothing here changes a result: what is computed again is computed by the same kernels from the same inputs,
with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtune_adaptive.core.private import schema_of
from torchtune_adaptive.core.step.knobs import is_checkpointed

Recomputed = Literal["nothing", "operations", "everything"]

_aten = torch.ops.aten
_MATRIX_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
_ATTENTION = {
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
}


class SwitchedLayer:
    """The forward pass of a layer, with a switch for what of it is computed again in backward.

    It takes the place of the layer's own ``forward``, so names and hooks stay as they are: FSDP's hooks are
    outside, which gathers the parameters once for backward and what is computed again in it; what is compiled
    is inside.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.recomputed: Recomputed = "nothing"
        self._forward = layer.forward
        layer.forward = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.recomputed == "nothing" or not torch.is_grad_enabled():
            return self._forward(*arguments, **named)
        run = checkpoint
        if self.recomputed == "operations":
            keeping = partial(create_selective_checkpoint_contexts, _policy)
            run = partial(checkpoint, context_fn=keeping)
        return run(self._forward, *arguments, use_reentrant=False, **named)


def _policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    if operation in _MATRIX_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    if operation in _ATTENTION and not _drops_out(operation, arguments, named):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _drops_out(operation: Any, arguments: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether an attention draws random numbers; kept, it would not draw them again, and what follows it
    would get other ones than in forward."""
    names = (argument.name for argument in schema_of(operation).arguments)
    given = {**dict(zip(names, arguments, strict=False)), **named}
    return bool(given.get("dropout_p", 0.0))


class RecomputedChunks:
    """A model's last projection, which can give the loss of a chunk at once and compute its logits again.

    It takes the place of the projection's own ``forward``. So the loss of a chunk is computed where the
    weight is gathered, in forward and again in backward, and FSDP sees what it sees without it.

    Args:
        head: the last projection of the model.
        summed_loss: the loss function, summed, of the logits of a chunk and its labels.
    """

    def __init__(
        self, head: nn.Module, summed_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        self.on = False
        self._project = head.forward
        self._summed_loss = summed_loss
        self._labels: Iterator[torch.Tensor] | None = None
        head.forward = self

    @contextmanager
    def replacing_logits(self, labels: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context in which the model gives the losses of its chunks in the place of their logits."""
        self._labels = iter(labels)
        try:
            yield
        finally:
            self._labels = None

    def __call__(self, hidden: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        if self._labels is None:
            return self._project(hidden, *weight)
        labels = next(self._labels)
        return checkpoint(self._loss_of, hidden, labels, *weight, use_reentrant=False)

    def _loss_of(
        self, hidden: torch.Tensor, labels: torch.Tensor, *weight: torch.Tensor
    ) -> torch.Tensor:
        logits = self._project(hidden, *weight)
        return self._summed_loss(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))


def recomputed_layers(checkpointing: str, layers: int) -> list[Recomputed]:
    """The part of each layer that is computed again, for a value of the knob ``CHECKPOINT``."""
    if checkpointing == "operations":
        return ["operations"] * layers
    numbers = range(1, layers + 1)
    return ["everything" if is_checkpointed(checkpointing, n) else "nothing" for n in numbers]
