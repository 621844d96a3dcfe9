"""Liger's kernels (0.8.5) as torch's own operations, with the memory of theirs and without their values.

Triton's kernels need a GPU. What takes memory is around them: what each function of autograd allocates, what
it keeps for backward, and which gradients it writes over what it has kept. ``liger`` says which modules of a
model get them. Nothing of Liger or Triton is imported.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torchtune_adaptive.library.trainer_parts import Autocast
from torchtune_adaptive.planner import fake_device

_PROGRAMS = 132
"""The multiprocessors of a GPU, an H100's: each sums the gradients of a norm's weight for its rows."""
_aten = torch.ops.aten


class Norm(torch.autograd.Function):
    """RMS norm, which keeps its input as it is and a number for each row."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        rows = inputs.contiguous().view(-1, inputs.shape[-1])
        found = torch.empty_like(rows)
        scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        fake_device.ran("rms_norm", [rows, weight], [found, scales])
        ctx.save_for_backward(rows, weight, scales)
        ctx.in_place = in_place
        return found.view(inputs.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight, scales = ctx.saved_tensors
        grad, of_weight = grad.contiguous(), None
        if ctx.needs_input_grad[1]:
            programs = 1 if weight.device.type == "cpu" else _PROGRAMS
            parts = torch.empty(programs, len(weight), dtype=torch.float32, device=weight.device)
        of_inputs = grad if ctx.in_place else torch.zeros_like(grad)
        fake_device.ran("rms_norm backward", [grad, rows, weight, scales], [of_inputs])
        if ctx.needs_input_grad[1]:
            of_weight = parts.sum(dim=0).to(weight.dtype)
        return of_inputs.view(grad.shape), of_weight, None


class GatedProduct(torch.autograd.Function):
    """The product of an activated gate and what it lets through; gradients take the memory of the two."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        found = torch.empty_like(gate)
        fake_device.ran("gated product", [gate, up], [found])
        ctx.save_for_backward(gate.view(gate.shape), up.view(up.shape))
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        fake_device.ran("gated product backward", [grad.contiguous(), *saved], saved)
        return saved


class Rotation(torch.autograd.Function):
    """The rotation of queries and keys in their own memory, and of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _rotated_in_place(query), _rotated_in_place(key)

    @staticmethod
    def backward(ctx: Any, of_query: torch.Tensor, of_key: torch.Tensor) -> Any:
        return _rotated_in_place(of_query), _rotated_in_place(of_key), None, None


def rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> Any:
    """``apply_rotary_pos_emb`` of transformers' models."""
    return Rotation.apply(query, key, cos, sin)


def _rotated_in_place(heads: torch.Tensor) -> torch.Tensor:
    """The same, with all heads of a token together in memory, as a kernel has rotated them there."""
    found = heads.transpose(1, 2).contiguous().transpose(1, 2)
    fake_device.ran("rotation", [found], [found])
    return found


class CrossEntropy(torch.autograd.Function):
    """Cross-entropy whose gradient is written over the logits in the forward pass."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = torch.zeros(len(logits), dtype=logits.dtype, device=logits.device)
        counted = targets != -100
        counted.sum()
        for bound in (torch.max, torch.min):
            bound(targets * counted)
        fake_device.ran("cross entropy", [logits, targets], [logits, losses])
        ctx.save_for_backward(logits.detach())
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return *ctx.saved_tensors, None


class HeadAndCrossEntropy(torch.autograd.Function):
    """The head and its cross-entropy, a chunk of tokens at a time, with all gradients in the forward pass.

    ``half`` is the type that mixed precision computes in, if there is any.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        half: torch.dtype | None,
    ) -> torch.Tensor:
        # Mixed precision keeps the cast of the weight, and of none of its views.
        hidden, transposed = hidden.detach(), weight.detach().t()
        (tokens, width), vocabulary = hidden.shape, len(weight)
        size = chunk_size(tokens, width, vocabulary)
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        counted = targets != -100
        counted.sum()
        in_memory = _in_memory(hidden, weight, half)
        kept = hidden.new_empty(size, vocabulary) if in_memory else None
        for begin in range(0, tokens, size):
            rows = slice(begin, min(begin + size, tokens))
            chunk = hidden[rows]
            if kept is not None:
                logits = kept[: len(chunk)]
                torch.mm(chunk, transposed, out=logits)
            else:
                logits = chunk @ transposed
            # The kernel reads the logits, and writes their gradients over them.
            fake_device.ran("cross entropy", [logits], [logits])
            if kept is not None:
                torch.mm(logits, weight, out=of_hidden[rows])
            else:
                of_hidden[rows] = logits @ weight
            if of_weight is not None:
                _add_product(of_weight, logits, chunk)
            del logits, chunk
        del kept
        loss = losses.sum()
        ctx.save_for_backward(of_hidden, of_weight)
        del counted
        return loss

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return *ctx.saved_tensors, None, None


def chunk_size(tokens: int, width: int, vocabulary: int) -> int:
    """The tokens of a chunk: so many that their logits take about as much as all hidden states."""
    chunks = -(-vocabulary // width)
    size = -(-tokens // chunks)
    return int(min(1 << (size - 1).bit_length(), tokens))


def head_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, half: torch.dtype | None
) -> torch.Tensor:
    """The loss of predicting each next token from all hidden states, by ``HeadAndCrossEntropy``."""
    padded = F.pad(labels, (0, 1), value=-100)
    targets = padded[..., 1:].contiguous()
    loss: torch.Tensor = HeadAndCrossEntropy.apply(
        hidden.view(-1, hidden.shape[-1]), weight, targets.view(-1), half
    )
    return loss / labels.numel()


def logits_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """transformers' loss of all logits, by ``CrossEntropy``."""
    logits = logits.float()
    padded = F.pad(labels, (0, 1), value=-100)
    targets = padded[..., 1:].contiguous()
    loss: torch.Tensor = CrossEntropy.apply(logits.view(-1, logits.shape[-1]), targets.view(-1))
    return loss / labels.numel()


def _in_memory(hidden: torch.Tensor, weight: torch.Tensor, half: torch.dtype | None) -> bool:
    """Whether products go to memory that all chunks share: on a GPU, where nothing has to be cast."""
    if hidden.device.type == "cpu" or hidden.dtype != weight.dtype:
        return False
    return not Autocast.entered or hidden.dtype == half


def _add_product(total: torch.Tensor, logits: torch.Tensor, chunk: torch.Tensor) -> None:
    """Add the gradient of the head's weight: on a GPU, of 16 bits at once (Ampere and newer)."""
    if total.device.type == "cpu" or logits.dtype == torch.float32:
        total += torch.mm(logits.t(), chunk).float()
        return
    chunk = chunk.to(logits.dtype)
    # Not by names that mixed precision would cast the sum for.
    if total.dtype == torch.float32:
        _aten.addmm.dtype_out(total, logits.t(), chunk, torch.float32, out=total)
    else:
        _aten.addmm.out(total, logits.t(), chunk, out=total)
