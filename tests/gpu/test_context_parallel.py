"""Attention over parts of rows, on two ranks that share a real device: torch's kernels, and what they pad.

NCCL takes a device for each rank, so keys and values go around on the CPU.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.context_parallel import attention_over_parts
from torchtune_adaptive.recipe.setup.environment import Environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 1e-1}
"""What rounding may take of numbers around 1; a piece in the wrong place takes more."""


def attend() -> list[tuple[torch.dtype, float]]:
    """The largest differences from attention over whole rows, in which its gradients count as well."""
    dist.init_process_group("gloo")
    torchs.ft_c = SimpleNamespace(  # type: ignore[assignment]
        AsyncCollectiveTensor=torchs.ft_c.AsyncCollectiveTensor,
        all_gather_single=_gathered,
        all_gather_tensor=_gathered,  # its name before torch 2.13
        permute_tensor=lambda mine, to, group: _gathered(mine).chunk(len(to))[dist.get_rank() - 1],
    )
    ways = product(TOLERANCE, ("allgather", "alltoall"), (1, 3))
    return [(dtype, _difference(dtype, rotation, times)) for dtype, rotation, times in ways]


def _difference(dtype: torch.dtype, rotation: str, times: int) -> float:
    """The largest difference in rows that are so many times as long as the shortest."""
    environment = Environment(torch.device(DEVICE), dtype, Ranks(timeout=200))
    cfg = OmegaConf.load(find_config("tiny/full"))
    assert OmegaConf.is_dict(cfg)
    cfg.context_parallel_dim, cfg.context_parallel_rotate_method = 2, rotation
    with attention_over_parts(Asked.of(cfg), environment) as context:
        assert context is not None
        length = context.parts.multiple * times
        places = context.parts.positions(length).to(DEVICE)
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(2, 4, length, 64, generator=generator) for _ in range(4)]
        found = _with_gradients([each.to(DEVICE, dtype)[:, :, places] for each in whole])
    with sdpa_kernel(SDPBackend.MATH):
        expected = _with_gradients([each.to(DEVICE) for each in whole])
    pairs = zip(found, expected, strict=True)
    return max(float((one.float() - other[:, :, places]).abs().max()) for one, other in pairs)


def _gathered(mine: torch.Tensor, **_: Any) -> torch.Tensor:
    parts = [torch.empty_like(mine, device="cpu") for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.cpu())
    return torch.cat(parts).to(mine.device)


def _with_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    *inputs, above = (each.contiguous() for each in tensors)
    inputs = [each.requires_grad_() for each in inputs]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    return [out, *torch.autograd.grad(out, inputs, above)]


def test_attention_over_parts_is_that_over_whole_rows() -> None:
    for differences in run_ranks(attend, 2, join=False, forked=False):
        for dtype, difference in differences:
            assert difference < TOLERANCE[dtype], differences
