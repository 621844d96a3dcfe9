"""Mixtures of experts while they are traced: how many rows each expert gets, which no trace knows.

Fake tensors have shapes and no values. So what a trace finds is true wherever a router sends tokens, unless
the model asks how many there are for an expert. Models of transformers (5.23) do where their experts are
computed one after the other (``experts_implementation="eager"``); here is what they are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchtune_adaptive.library.step_questions import WORST


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that hold the experts of a layer, as transformers names them."""
    return [
        one
        for one in model.modules()
        if type(one).__name__.endswith("Experts") and type(_number(one)) is int
    ]


def sizes_of(routing: str, tokens: int, chosen: int, experts: int) -> list[int]:
    """The rows of each expert that gets some, where each token goes to so many ``chosen`` ones."""
    if routing == WORST:
        return [tokens] * chosen
    each, more = divmod(tokens * chosen, experts)
    return [size for number in range(experts) if (size := each + (number < more))]


class Routing:
    """Tells experts that are computed one after the other how many rows each of them gets.

    Args:
        routing: ``EVEN`` or ``WORST``.
        model: the model, whose experts are to be told from now on.
    """

    def __init__(self, routing: str, model: nn.Module) -> None:
        self._routing = routing
        self._running: list[_Layer] = []
        self._told: list[_Layer] = []
        self.experts = experts_of(model)
        """The modules with experts."""
        for one in self.experts:
            one.register_forward_pre_hook(self._begin, with_kwargs=True)
            one.register_forward_hook(self._end, always_call=True)

    @property
    def asked(self) -> bool:
        """Whether an expert has asked, so that what was traced is of this routing and of no other."""
        return bool(self._told)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = next((one for one in (*args, *kwargs.values()) if _is_choice(one)), None)
        tokens, most = (0, 0) if chosen is None else chosen.shape
        sizes = sizes_of(self._routing, tokens, most, _number(module))
        # Not around the step: a mode is off in backward, where checkpointing runs layers again.
        self._running.append(_Layer(sizes, self._told).__enter__())

    def _end(self, *_: Any) -> None:
        self._running.pop().__exit__(None, None, None)


class _Layer(TorchFunctionMode):
    """The experts of a layer whose forward pass runs, with the rows of each that gets some."""

    def __init__(self, sizes: list[int], told: list[_Layer]) -> None:
        super().__init__()
        self._sizes, self._told = sizes, told
        self._next = iter(sizes)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in ("nonzero", "where") or len(args) != 1:
            return func(*args, **kwargs)
        self._told[:] = [self]
        mask: torch.Tensor = args[0]
        if mask.dim() > 1 or name == "where":
            return mask.new_empty(next(self._next), mask.dim(), dtype=torch.long).unbind(1)
        # Which experts those are does not matter: they are as large.
        in_memory = mask.new_empty(len(self._sizes), 1, dtype=torch.long)
        return _Numbers(in_memory, [(number,) for number in range(len(self._sizes))])


class _Numbers:
    """The numbers of experts: known to the host, and in memory of the device as well."""

    def __init__(self, in_memory: torch.Tensor, numbers: Sequence[tuple[int] | int]) -> None:
        self._in_memory, self._numbers = in_memory, numbers

    def __iter__(self) -> Iterator[tuple[int] | int]:
        return iter(self._numbers)

    def squeeze(self, _: int) -> _Numbers:
        return _Numbers(self._in_memory, range(len(self._numbers)))


def _is_choice(value: Any) -> bool:
    """Whether it is the experts that a router has chosen for each token."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 2
        and value.dtype in (torch.int32, torch.int64)
    )


def _number(module: nn.Module) -> Any:
    """The number of experts that a module has."""
    return getattr(module, "num_experts", None)
