"""Context parallelism as torch does it, where a rank has a part of each row: with the CPU's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from tests.helpers.decoder import Attention

_HEADS, _SEQUENCE = 1, 2  # dimensions of queries, keys and values
TORCHS = "torch's context"
WAYS = (
    *("ring", "balanced ring", "gathered ring", "undeclared ring", TORCHS),
    *("gathering operator", "exchanged heads"),
)
"""The step is told which ranks hold parts of the same rows, but for the undeclared ring."""


def spread_context(way: str, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let a model's attention see the whole rows, of which each rank of a group has a part."""
    if way == TORCHS:
        return  # see ``torchs_context``
    torchs.set_rotate_method("allgather" if way == "gathered ring" else "alltoall")
    torchs._cp_options.enable_load_balance = way == "balanced ring"
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = _attention(way, group)


def part_of(way: str, rows: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, Any]:
    """A rank's part of rows: with a balanced ring, a piece from the front and one from the back."""
    labels = F.pad(rows["labels"][:, 1:], (0, 1), value=-100)
    pieces = torch.arange(rows["tokens"].shape[1]).chunk(2 * ranks)
    balanced = way in ("balanced ring", TORCHS)
    mine = (rank, 2 * ranks - 1 - rank) if balanced else (2 * rank, 2 * rank + 1)
    at = torch.cat([pieces[number] for number in mine])
    positions = at.expand(len(labels), -1).contiguous()
    return {"tokens": rows["tokens"][:, at], "labels": labels[:, at], "input_pos": positions}


def _attention(way: str, group: dist.ProcessGroup) -> Any:
    def ring(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return _Ring.apply(q.contiguous(), k.contiguous(), v.contiguous(), group)

    def gathering(q: Any, k: Any, v: Any, **_: Any) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _cp_custom_ops

        k, v = _cp_custom_ops.flex_cp_allgather(k, v, _SEQUENCE, group.group_name)
        mine = torch.arange(q.shape[_SEQUENCE]) + dist.get_rank(group) * q.shape[_SEQUENCE]
        allowed = mine[:, None] >= torch.arange(k.shape[_SEQUENCE])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    def exchanging(q: Any, k: Any, v: Any, **_: Any) -> Any:
        whole_rows = (_Exchange.apply(each, group, _HEADS, _SEQUENCE) for each in (q, k, v))
        outputs = F.scaled_dot_product_attention(*whole_rows, is_causal=True)
        return _Exchange.apply(outputs, group, _SEQUENCE, _HEADS)

    others = {"gathering operator": gathering, "exchanged heads": exchanging}
    return others.get(way, ring)


class _Exchange(torch.autograd.Function):
    """An all-to-all in equal parts, which splits a tensor along one dimension instead of another: a rank has
    some of the heads of whole rows, as with DeepSpeed's Ulysses, or all heads of parts of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, group: Any, split: int, joined: int) -> Any:
        ctx.back = group, joined, split
        sent = torch.stack(tensor.chunk(group.size(), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat([*received], joined)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        return _Exchange.apply(grad, *ctx.back), None, None, None


def _forward(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attention(query, key, value, 0.0, is_causal)


def _backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool
) -> Any:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return attention(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)


class _Ring(torch.autograd.Function):
    """What torch's context parallelism makes of ``scaled_dot_product_attention`` on a GPU."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Any) -> Any:
        ring = torchs._templated_ring_attention
        out, logsumexp = ring(group, _SEQUENCE, _forward, q, k, v, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        ring = torchs._templated_ring_attention_backward
        found = ring(
            ctx.group,
            _SEQUENCE,
            _backward,
            grad.contiguous(),
            "grad_out",
            *ctx.saved_tensors,
            is_causal=True,
        )
        return *found[:3], None


@contextmanager
def torchs_context(mesh: DeviceMesh) -> Iterator[None]:
    """A context in which torch replaces attention, as users of its ``context_parallel`` have it."""
    torchs.set_rotate_method("allgather")
    torchs._cp_options.enable_load_balance = True
    pieces = torch.arange(2 * mesh.size())
    with (
        kernels_of_the_cpu(),
        torchs.context_parallel(mesh, buffers=[pieces], buffer_seq_dims=[0]),
    ):
        yield


@contextmanager
def kernels_of_the_cpu() -> Iterator[None]:
    """A context in which torch's ``context_parallel`` knows the CPU's attention besides that of GPUs."""
    ours = {_FORWARD: _attend, _BACKWARD: _attend_backward}
    torchs.custom_ops.update(ours)
    try:
        yield
    finally:
        for operator in ours:
            del torchs.custom_ops[operator]


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _attend(operator: Any, arguments: Any, named: Any) -> Any:
    def ring(
        group: Any, query: Any, key: Any, value: Any, _: Any = 0.0, causal: Any = False
    ) -> Any:
        around = torchs._templated_ring_attention
        return around(group, _SEQUENCE, _forward, query, key, value, is_causal=causal)[:2]

    return _on_local_tensors(ring, arguments)


def _attend_backward(operator: Any, arguments: Any, named: Any) -> Any:
    def ring(group: Any, grad: Any, *tensors: Any) -> Any:
        *tensors, _, causal = tensors
        around = torchs._templated_ring_attention_backward
        return around(group, _SEQUENCE, _backward, grad, "grad_out", *tensors, is_causal=causal)[:3]

    return _on_local_tensors(ring, arguments)


def _on_local_tensors(ring: Any, arguments: Any) -> Any:
    mesh, placements = arguments[0].device_mesh, arguments[0].placements
    local = [each.to_local() if isinstance(each, DTensor) else each for each in arguments]
    found = ring(mesh.get_group(), *local)
    return tuple(DTensor.from_local(each, mesh, placements, run_check=False) for each in found)
