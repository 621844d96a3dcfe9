"""The optimizers that transformers' ``optim`` names, with the memory that they take.

torch's and transformers' own are used. Those of bitsandbytes need it and a GPU: here they hold the same state
and compute nothing. Checked against transformers 5.23 and bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from torchtune_adaptive.planner import fake_device

_LEARNING_RATE = 1e-5

Groups = list[dict[str, Any]]


class BlockwiseAdamW(Optimizer):
    """The state of bitsandbytes' ``AdamW``: two moments of 32 bits, or of 8 with a scale for each block.

    Small tensors and embeddings have 32 bits always. *Paged* moments of large tensors are in managed memory:
    CUDA moves it between host and device, and torch's allocator has nothing of it. On a CPU nothing is paged.
    """

    SMALLEST = 4096
    """Elements of the smallest tensor whose moments have 8 bits."""
    BLOCK = 256
    """Elements that have a scale in common."""
    SMALLEST_PAGED = 100_000
    VALUES = 256
    """Numbers that 8 bits stand for, of which there is a table for each moment."""

    def __init__(self, groups: Groups, lr: float, *, bits: int, paged: bool) -> None:
        super().__init__(groups, {"lr": lr})
        self._bits, self._paged = bits, paged
        self._tables: tuple[torch.Tensor, ...] = ()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self._made(parameter)
                self._update(parameter, parameter.grad)

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """One kernel, in which paged moments are taken to be on the GPU."""
        state = [one for one in self.state[parameter].values() if isinstance(one, torch.Tensor)]
        paged = 0
        if self._is_paged(parameter):  # two moments, read and written
            paged = 4 * parameter.numel() * (4 if self._is_wide(parameter) else 1)
        fake_device.ran("adamw", [parameter, grad, *state], [parameter, *state], paged)

    def _is_wide(self, parameter: torch.Tensor) -> bool:
        """Whether its moments have 32 bits."""
        is_small = parameter.numel() < self.SMALLEST
        return self._bits == 32 or is_small or hasattr(parameter, "of_embedding")

    def _is_paged(self, parameter: torch.Tensor) -> bool:
        is_large = parameter.numel() >= self.SMALLEST_PAGED
        return self._paged and is_large and parameter.device.type != "cpu"

    def _made(self, parameter: torch.Tensor) -> dict[str, Any]:
        device, size = parameter.device, parameter.numel()
        wide = self._is_wide(parameter)
        state: dict[str, Any] = {"step": 0}
        if not self._is_paged(parameter):
            dtype = torch.float32 if wide else torch.uint8
            state |= {
                name: torch.zeros_like(parameter, dtype=dtype) for name in ("first", "second")
            }
        if not wide:
            if not self._tables:
                self._tables = tuple(torch.zeros(self.VALUES, device=device) for _ in range(2))
            blocks = -(-size // self.BLOCK)
            state |= {f"scales{n}": torch.zeros(blocks, device=device) for n in (1, 2)}
            state |= {f"table{n}": table for n, table in enumerate(self._tables, 1)}
        return state


def mark_embeddings(model: nn.Module) -> None:
    """Let ``BlockwiseAdamW`` know the weights of embeddings, which are replaced before they are used."""

    def mark(embedding: Any, _: Any) -> None:
        embedding.weight.of_embedding = True

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(mark)


def _adafactor(groups: Groups, lr: float) -> Optimizer:
    from transformers.optimization import Adafactor

    class Updated(Adafactor):
        """Keeps one number for each tensor where transformers' replaces it in each step: traces are of steps
        that leave behind what they find."""

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:
            kept = {parameter: state["RMS"] for parameter, state in self.state.items()}
            super().step(closure)
            for parameter, number in kept.items():
                self.state[parameter]["RMS"] = number.copy_(self.state[parameter]["RMS"])

    return Updated(groups, lr=lr, scale_parameter=False, relative_step=False)


_BITSANDBYTES: dict[str, Callable[..., Optimizer]] = {
    "adamw_8bit": partial(BlockwiseAdamW, bits=8, paged=False),
    "adamw_bnb_8bit": partial(BlockwiseAdamW, bits=8, paged=False),
    "paged_adamw_8bit": partial(BlockwiseAdamW, bits=8, paged=True),
    "paged_adamw_32bit": partial(BlockwiseAdamW, bits=32, paged=True),
}
_MADE: dict[str, Callable[..., Optimizer]] = {
    "adamw_torch_fused": partial(AdamW, fused=True),
    "adamw_torch": AdamW,
    **_BITSANDBYTES,
    "adafactor": _adafactor,
    "sgd": SGD,
}


def make_optimizer(name: str, groups: Groups) -> Optimizer:
    return _MADE[name](groups, lr=_LEARNING_RATE)
