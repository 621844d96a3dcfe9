"""What TRL does with a model besides training it: weights that vLLM gets, a reference that FSDP2 shards.

As far as memory goes, and without values. Checked against TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune_adaptive.library.quantized import QuantizedLinear
from torchtune_adaptive.library.trainer_parts import Adapted


def send_weights(model: nn.Module) -> None:
    """Give vLLM the weights, one after the other; adapters are merged first."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Adapted):
                base = module.base
                whole = None
                if isinstance(base, QuantizedLinear):
                    whole = base.dequantized(module.lora_a.weight.dtype)
                (module.lora_b.weight @ module.lora_a.weight) * 2.0
                del whole
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                parameter.full_tensor()


def shard(model: nn.Module, ranks: int) -> None:
    """Leave the largest share of a model that is only scored with; ``gathered`` has all of it."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        weights = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        shards = {name: _Shard(one.shape, owners.get(id(one))) for name, one in weights}
        for name, weight in weights:
            owners[id(weight)] = module
            own = 0 if shards[name].owner else -(-weight.shape[0] // ranks)
            delattr(module, name)
            module.register_buffer(name, weight.new_empty(own, *weight.shape[1:]), persistent=False)
        module.shards = shards  # type: ignore[assignment]


class _Shard(NamedTuple):
    """What a weight is of which there is a share."""

    shape: torch.Size
    owner: nn.Module | None
    """The module that has the same weight by the same name, if they are tied."""


@contextmanager
def gathered(model: nn.Module, half: torch.dtype | None) -> Iterator[None]:
    """A context in which a model that ``shard`` has left a share of is whole.

    TRL shards its reference as one unit. So FSDP2 gathers all of it at once, and then copies each weight out
    of what it has gathered.
    """
    shards = [
        (module, name, one, getattr(module, name))
        for module in model.modules()
        for name, one in getattr(module, "shards", {}).items()
    ]
    own = [(one.shape, share) for _, _, one, share in shards if one.owner is None]
    together = [
        torch.empty(shape.numel(), dtype=half or share.dtype, device=share.device)
        for shape, share in own
    ]
    for module, name, one, share in shards:
        whole = (
            torch.empty(one.shape, dtype=half or share.dtype, device=share.device)
            if one.owner is None
            else getattr(one.owner, name)
        )
        setattr(module, name, whole)
    del together, whole
    try:
        yield
    finally:
        for module, name, _, share in shards:
            setattr(module, name, share)


def numbers_in_weights(model: nn.Module) -> int:
    """The numbers in the weights of a model, without adapters."""
    adapters = {
        id(weight)
        for module in model.modules()
        if isinstance(module, Adapted)
        for weight in (module.lora_a.weight, module.lora_b.weight)
    }
    return sum(one.numel() for one in model.parameters() if id(one) not in adapters)
