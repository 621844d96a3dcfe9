"""Arithmetic on the gradients of a step, sharded or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from torchtune_adaptive.core.private import foreach_mul_, foreach_norm


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parts(tensor: torch.Tensor) -> int:
    """The number of parts into which ranks split a tensor, over all dimensions of its mesh."""
    number = 1
    if isinstance(tensor, DTensor):
        for dim, kind in enumerate(map(type, tensor.placements)):
            if _splits(kind):
                number *= tensor.device_mesh.size(dim)
    return number


@cache  # asked for each gradient of each step
def _splits(placement: type[Placement]) -> bool:
    # By what it is not: what FSDP splits where tensor parallelism has split before has its own placement,
    # whose class is private, and a subclass of ``Shard`` on some versions of torch only.
    return not issubclass(placement, (Replicate, Partial))


@torch.no_grad()
def squared_norm(
    gradients: Iterable[torch.Tensor], ranks: int, device: torch.device
) -> torch.Tensor:
    """This rank's part of the squared norm of all gradients; the parts of all ranks are to be summed."""
    by_share: dict[float, list[torch.Tensor]] = {}
    for gradient in gradients:
        # Where several ranks hold the same piece, each of them counts for less than 1.
        by_share.setdefault(parts(gradient) / ranks, []).append(local(gradient))
    norms = [
        torch.stack(foreach_norm(group, 2.0, dtype=torch.float32)).double().square().sum() * share
        for share, group in by_share.items()
    ]
    return torch.stack(norms).sum() if norms else torch.zeros((), device=device)


@torch.no_grad()
def scale(gradients: Iterable[torch.Tensor], factor: float, run: Callable[..., Any]) -> None:
    """Multiply gradients in place; ``run`` is given each kernel with its arguments, to call it."""
    together = []
    for piece in map(local, gradients):
        if piece.device.type == "cpu":  # where foreach would round the factor to the piece's dtype
            run(piece.mul_, factor)
        else:
            together.append(piece)
    if together:
        run(foreach_mul_, together, factor)


def divide(number: float, tokens: float) -> float:
    """``number / tokens`` as torchtune's recipes round it: in float32, through the reciprocal."""
    return float(torch.tensor(max(tokens, 1), dtype=torch.float32).reciprocal() * number)


class LossScale:
    """Loss scaling for float16: the scale of a ``GradScaler``, and its way of adapting it.

    The scaler would look for overflow in this rank's gradients. A sharded gradient may overflow on one rank
    alone, so here the norm of the whole gradient decides, which is infinite on all ranks or on none. The
    scaler is kept up to date: its ``state_dict`` is the run's.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.factor = float(scaler.get_scale())

    @classmethod
    def of(cls, scaler: GradScaler | None) -> LossScale | None:
        """The scale of a scaler; None if there is none, or it is not enabled."""
        return None if scaler is None or not scaler.is_enabled() else cls(scaler)

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step: lower it at once, raise it after a while without overflow."""
        state = self._scaler.state_dict()
        steps = 0 if overflow else state["_growth_tracker"] + 1
        if overflow:
            state["scale"] *= state["backoff_factor"]
        elif steps == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            steps = 0
        state["_growth_tracker"] = steps
        self._scaler.load_state_dict(state)
        self.factor = float(state["scale"])


@dataclass(frozen=True)
class Scaling:
    """The factors that turn reduced gradients of summed losses into those of the mean loss, clipped."""

    averaged_over: float
    clip_norm: float | None
    loss_scale: LossScale | None

    @property
    def needs_norm(self) -> bool:
        return self.clip_norm is not None or self.loss_scale is not None

    def to_mean(self, weight: float) -> float:
        factor = divide(self.averaged_over, weight)
        return factor if self.loss_scale is None else factor / self.loss_scale.factor

    def norm(self, squared: float, weight: float) -> float | None:
        """The norm of the mean gradient, where it is clipped, from that of the reduced one."""
        return None if self.clip_norm is None else squared**0.5 * self.to_mean(weight)

    def overflows(self, squared_norm: float) -> bool:
        return self.loss_scale is not None and not math.isfinite(squared_norm)

    def factor(self, weight: int, norm: float | None) -> float:
        factor = self.to_mean(weight)
        if self.clip_norm is not None and norm is not None:
            factor *= min(1.0, self.clip_norm / (norm + 1e-6))
        return factor
