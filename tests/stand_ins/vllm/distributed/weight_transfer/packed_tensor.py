from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm.server import sent


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
) -> None:
    """Send weights to the server."""
    for each in iterator:
        sent.put(post_iter_func(each).detach().clone())
