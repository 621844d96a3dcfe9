"""Gathering a model in host memory: what it takes, and how to take less."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torchtune import training

MOMENTS = 2
"""Tensors that optimizers keep for each trained parameter: Adam's. Few keep more, some keep fewer."""


def gathered_bytes(model: nn.Module) -> int:
    """The host memory that a gathered checkpoint takes: all weights, and the state of the optimizer."""
    parameters = [*model.parameters()]  # of sharded ones, the numbers are of the whole
    weights = sum(each.numel() * each.element_size() for each in parameters)
    trained = sum(each.numel() * each.element_size() for each in parameters if each.requires_grad)
    return weights + MOMENTS * trained


def weights_in_files(
    weights: Mapping[str, torch.Tensor],
    keeps: Callable[[str], bool],
    device: torch.device,
    folder: Path,
) -> dict[str, torch.Tensor]:
    """Whole weights in memory that files back: the host can write it back and use it elsewhere.

    They are gathered one by one. The files have no names, so their space is free again with the last tensor.

    Args:
        weights: those of a model, of which each rank may have a part.
        keeps: whether this rank needs the weight of a name.
        folder: a folder on a filesystem with room for the weights.

    Raises:
        OSError: after all have been gathered, if this rank has no room.
    """
    gathered, problem = dict[str, torch.Tensor](), None
    for name, weight in weights.items():
        one = SimpleNamespace(state_dict=lambda name=name, weight=weight: {name: weight})
        whole = training.gather_cpu_state_dict(one, keeps(name), device=device)
        if keeps(name) and problem is None:
            try:
                gathered[name] = _in_a_file(whole[name], folder)
            except OSError as error:  # the others are gathering the next one
                gathered, problem = {}, error
    if problem is not None:
        raise problem
    return gathered


def _in_a_file(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    if not tensor.nbytes:
        return tensor
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        # Where a disk is full, a write to mapped memory would end the process.
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        mapped = torch.from_file(file.name, shared=True, size=tensor.nbytes, dtype=torch.uint8)
    return mapped.view(tensor.dtype).view(tensor.shape).copy_(tensor)
