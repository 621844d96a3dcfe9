"""Arithmetic on the gradients of a step, sharded or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from ctypes import c_float
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


def _all_local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    # Without a call for each that is plain: a step does nothing else as often.
    return [each if type(each) is torch.Tensor else local(each) for each in tensors]


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
        torch.stack(_norms(group)).double().square().sum() * share
        for share, group in by_share.items()
    ]
    return torch.stack(norms).sum() if norms else torch.zeros((), device=device)


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [n for group in _alike(tensors) for n in foreach_norm(group, 2.0, dtype=torch.float32)]


def _alike(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Groups of tensors of one dtype, which one kernel takes; others would get one each."""
    if len({tensor.dtype for tensor in tensors}) == 1 == len({tensor.is_cpu for tensor in tensors}):
        return [tensors]  # as nearly always
    groups: dict[tuple[bool, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.is_cpu, tensor.dtype), []).append(tensor)
    return groups.values()


@torch.no_grad()
def scale(gradients: Iterable[torch.Tensor], factor: float, run: Callable[..., Any]) -> None:
    """Multiply gradients in place; ``run`` is given each kernel with its arguments, to call it."""
    for group in _alike(_all_local(gradients)):
        if group[0].is_cpu and group[0].dtype in (torch.bfloat16, torch.float16):
            for piece in group:  # foreach would round the factor to their dtype there
                run(piece.mul_, factor)
        else:
            run(foreach_mul_, group, factor)


def divide(number: float, tokens: float) -> float:
    """``number / tokens`` as torchtune's recipes round it: in float32, through the reciprocal."""
    # A float64 has more than twice the digits: what is rounded from it is what float32 computes.
    reciprocal = c_float(1 / c_float(max(tokens, 1)).value).value
    return c_float(reciprocal * c_float(number).value).value


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
