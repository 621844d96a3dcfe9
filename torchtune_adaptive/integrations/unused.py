"""Parameters that some rows do not use, such as those of a vision tower where rows are text alone."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.core import Ranks


class Unused:
    """What ``DistributedDataParallel`` does with ``find_unused_parameters``, for a step of micro-batches.

    A step sums the gradients of the same parameters on all ranks. So a parameter that no row of this rank
    uses gets a gradient of zeros. One that no row of any rank uses has none in the end, so that the optimizer
    leaves it alone, and its state. Nothing is done for a model that does not look for unused parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters: list[nn.Parameter] = []
        for each in model.modules():  # a compiled model wraps the wrapper
            if isinstance(each, DistributedDataParallel) and each.find_unused_parameters:
                self._parameters = [one for one in each.parameters() if one.requires_grad]
        self.forget()

    def forget(self) -> None:
        """Begin a step, or begin it again."""
        self._used = [False] * len(self._parameters)

    def joined(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch, in which all parameters take part."""
        reached = _leaves(loss) if self._parameters else set()
        for at, parameter in enumerate(self._parameters):
            if parameter in reached:
                self._used[at] = True
            elif parameter.grad is None:
                loss = loss + parameter.flatten()[:0].sum()
        return loss

    def settle(self, ranks: Ranks) -> None:
        """Drop the gradients of parameters that no rank has used, at the end of a step."""
        if not self._parameters:
            return
        used = bytes(self._used)
        least, most = ranks.spread(crc32(used))
        of_ranks = [used] if least == most else ranks.gather(used)
        for parameter, *uses in zip(self._parameters, *of_ranks, strict=True):
            # Reentrant checkpointing hides what it uses from `joined`, but not its gradient.
            if not any(uses) and parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None


def _leaves(loss: torch.Tensor) -> set[torch.Tensor]:
    """The leaves of the graph that a loss has come from."""
    leaves: set[torch.Tensor] = set()
    seen: set[Any] = {None}  # what needs no gradient
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.add(variable)
        ahead += [each for each, _ in node.next_functions]
    return leaves
