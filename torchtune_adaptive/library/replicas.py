"""``DistributedDataParallel`` as planning needs it: without its C++ part, which cannot hold fake tensors.

A step runs micro-batches without its reduction, and sums the gradients itself (see ``core.ranks.reduction``).
So what is left of it is the wrapping, and the memory of its buckets.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def _init(
    wrapper: DistributedDataParallel,
    module: nn.Module,
    *_: Any,
    process_group: dist.ProcessGroup | None = None,
    broadcast_buffers: bool = True,
    mixed_precision: object = None,
    **__: Any,
) -> None:
    nn.Module.__init__(wrapper)
    wrapper.module = module
    wrapper.process_group = process_group or dist.group.WORLD  # type: ignore
    wrapper.broadcast_buffers, wrapper.mixed_precision = broadcast_buffers, mixed_precision  # type: ignore


def _forward(wrapper: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
    return wrapper.module(*inputs, **named)


def _no_sync(wrapper: DistributedDataParallel) -> AbstractContextManager[None]:
    return nullcontext()


def only_wrap() -> None:
    """Make ``DistributedDataParallel`` wrap models, and do nothing else, in all of this process."""
    methods = {"__init__": _init, "forward": _forward, "no_sync": _no_sync}
    for name, method in methods.items():
        setattr(DistributedDataParallel, name, method)


def buckets(model: nn.Module) -> list[torch.Tensor]:
    """Memory for the buckets, which are as large as the gradients; none if the model is not wrapped."""
    wrapped = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    trained = [p for one in wrapped for p in one.parameters() if p.requires_grad]
    return [torch.empty_like(p, requires_grad=False) for p in trained]
