"""Adapters of parameters that no linear layer has, such as those of experts, as PEFT (0.21) has them.

A layer's experts share one tensor. PEFT adds the product of an adapter's factors to all of it in each pass,
which takes the memory of another such tensor. Backward needs it as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.library.private import converted_like

_NAMED_BEFORE: Mapping[str, Mapping[str, str]] = {
    "mixtral": {
        "gate": "gate.weight",
        "w1": "gate_up_proj",
        "w3": "gate_up_proj",
        "w2": "down_proj",
    },
    "qwen2_moe": {
        "gate": "gate.weight",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
}
"""Linear layers that models had in transformers 4, and the parameters that they are a part of in 5, by the
type whose checkpoints are converted alike. PEFT takes the names to stand for these parameters."""


class HasAdapter(nn.Module):
    """What has an adapter that can be switched off."""

    enabled = True


class AdaptedParameter(HasAdapter):
    """A module, a parameter of which has an adapter."""

    def __init__(self, base: nn.Module, name: str, r: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.name = base, name
        shape = self._holder().get_parameter(name).shape
        self.experts = shape[0] if len(shape) == 3 else 1
        self.turned = len(shape) == 3 and getattr(self._holder(), "is_transposed", False)
        inputs, outputs = shape[-2:] if self.turned else reversed(shape[-2:])
        self.lora_a = nn.Linear(inputs, r * self.experts, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(r * self.experts, outputs, bias=False, dtype=dtype)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not self.enabled:
            return self.base(*inputs, **named)
        with self._added():
            return self.base(*inputs, **named)

    def _holder(self) -> nn.Module:
        """The module that has the parameter."""
        found = self.base
        while isinstance(found, AdaptedParameter):
            found = found.base
        return found

    @contextmanager
    def _added(self) -> Iterator[None]:
        """A context in which the module finds the adapted parameter in the place of its own."""
        holder = self._holder()
        factors = self._factors(holder.get_parameter(self.name))
        parametrize.register_parametrization(holder, self.name, _Sum(*factors))
        # Its place is another one now, where it would require a gradient again.
        holder.parametrizations[self.name].original.requires_grad_(False)  # type: ignore
        try:
            with parametrize.cached():
                yield
        finally:
            parametrize.remove_parametrizations(holder, self.name, leave_parametrized=False)

    def _factors(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is multiplied and added; one expert's product is computed before."""
        down, up = self.lora_a.weight, self.lora_b.weight
        if self.experts == 1:
            return ((up @ down) * 2.0).to(weight.dtype), None
        down = down.reshape(self.experts, -1, down.shape[-1])
        up = up.reshape(up.shape[0], -1, self.experts).permute(2, 0, 1)
        left, right = (down.transpose(-2, -1), up.transpose(-2, -1)) if self.turned else (up, down)
        return left.to(weight.dtype), right.to(weight.dtype)


class _Sum(nn.Module):
    """A weight with what an adapter adds to it."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor | None) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if self.right is None:
            return weight + self.left
        # Of torch.ops, so that autocast leaves the type as it is, as PEFT has it.
        found: torch.Tensor = torch.ops.aten.baddbmm.default(
            weight, self.left, self.right, alpha=2.0
        )
        return found


def parameter_targets(
    model: Any, modules: Collection[str], everywhere: bool, r: int
) -> tuple[set[str], dict[str, int]]:
    """The linear layers that are left of those that are to have adapters, by name, and the parameters that
    PEFT takes others to stand for, with the ranks of their adapters.

    Args:
        model: the model, not adapted yet.
        modules: the names that are asked for, or of all linear layers.
        everywhere: whether all linear layers were asked for, those of transformers 4 among them.
        r: the rank that was asked for.
    """
    names = _NAMED_BEFORE.get(converted_like(model.config.model_type), {})
    wanted = {*modules, *names} if everywhere else {*modules}
    ranks: dict[str, int] = {}
    for parameter in dict.fromkeys(names.values()):
        parts = {name for name, whole in names.items() if whole == parameter}
        if missing := parts - wanted:
            if missing != parts:
                raise UsageError(
                    f"target_modules: {', '.join(sorted(parts - missing))} without "
                    f"{', '.join(sorted(missing))}, but they are one tensor ({parameter}), so PEFT refuses "
                    "it. Name all of them, or none."
                )
            continue
        ranks[parameter] = r * len(parts)
    return wanted - names.keys(), ranks


def adapt_parameters(model: nn.Module, ranks: Mapping[str, int], dtype: torch.dtype) -> None:
    """Add adapters of some ranks to parameters, by the ends of their names.

    Raises:
        UsageError: there is none that a name stands for, or it has neither two nor three dimensions.
    """
    found = {
        name: next((r for end, r in ranks.items() if _ends(name, end)), 0)
        for name, _ in model.named_parameters()
    }
    for end in ranks:
        sizes = [p.dim() for name, p in model.named_parameters() if _ends(name, end)]
        if not sizes or {*sizes} - {2, 3}:
            is_not = "not of two or three dimensions" if sizes else "none of the model's parameters"
            raise UsageError(
                f"target_parameters: {end} is {is_not}. Name parameters as experts have them, such as "
                "gate_up_proj and down_proj."
            )
    for name, r in found.items():
        if r:
            place, _, last = name.rpartition(".")
            parent, _, own = place.rpartition(".")
            adapted = AdaptedParameter(model.get_submodule(place), last, r, dtype)
            setattr(model.get_submodule(parent), own, adapted)


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")
