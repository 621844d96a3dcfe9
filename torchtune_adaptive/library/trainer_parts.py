"""What the trainers of transformers and TRL add to a model, with the memory that it takes.

Mixed precision as accelerate sets it up, adapters as PEFT has them, the head that TRL computes in tiles, and
the loss of preferences. ``transformers_step`` says which versions they were checked against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.library.expert_adapters import (
    HasAdapter,
    adapt_parameters,
    parameter_targets,
)
from torchtune_adaptive.library.four_bit import FourBitLinear
from torchtune_adaptive.library.private import tree_map_only
from torchtune_adaptive.library.quantized import QuantizedLinear
from torchtune_adaptive.library.step_choices import (
    ALL_LINEAR,
    LINEAR_LAYERS,
    TILE_COLUMNS,
    TILE_TOKENS,
)
from torchtune_adaptive.planner import fake_device


class Traceable(TorchFunctionMode):
    """What models of transformers do and a trace cannot: torch makes no tensors of lists that index one for
    a device that is not real."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.__getitem__:
            tensor, at = args
            if isinstance(at, tuple):
                at = tuple(torch.tensor(one) if isinstance(one, list) else one for one in at)
            return func(tensor, at)
        return func(*args, **(kwargs or {}))


class Autocast(Traceable):
    """``torch.autocast`` to a type of 16 bits, also for devices that torch has no such kernels for.

    As torch's, it keeps the casts of weights until it ends: of those that require a gradient, or of all. A
    softmax that is given a ``dtype`` has that one (gpt-oss asks for 16 bits).
    """

    _LOWER = frozenset(
        ("linear", "matmul", "__matmul__", "bmm", "mm", "addmm", "baddbmm", "conv1d")
    )
    _HIGHER = frozenset(("softmax", "log_softmax", "cross_entropy", "nll_loss", "layer_norm"))
    entered = 0
    """How often one of them has been entered, and not left."""

    def __init__(self, half: torch.dtype = torch.bfloat16, keeps_all: bool = False) -> None:
        super().__init__()
        self._dtype = half
        self._keeps_all = keeps_all
        self._casts: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Autocast:
        super().__enter__()
        Autocast.entered += 1
        self._attention = attention = F.scaled_dot_product_attention

        def in_half(*args: Any, **kwargs: Any) -> torch.Tensor:
            args, kwargs = tree_map_only(torch.Tensor, self._half, (args, kwargs))
            return attention(*args, **kwargs)

        # A tracer may have made a Python function of it, which no mode sees.
        F.scaled_dot_product_attention = in_half
        return self

    def __exit__(self, *error: Any) -> None:
        F.scaled_dot_product_attention = self._attention
        self._casts.clear()
        Autocast.entered -= 1
        super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in self._LOWER:
            args, kwargs = tree_map_only(torch.Tensor, self._half, (args, kwargs))
        elif name in self._HIGHER and kwargs.get("dtype") is None:
            args, kwargs = tree_map_only(torch.Tensor, _full, (args, kwargs))
        return super().__torch_function__(func, types, args, kwargs)

    def _half(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (self._dtype, torch.float64):
            return tensor
        if tensor.dtype != torch.float32:
            return tensor.to(self._dtype)
        kept = tensor.requires_grad or (self._keeps_all and isinstance(tensor, nn.Parameter))
        if not (tensor.is_leaf and kept):
            return tensor.to(self._dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor.to(self._dtype)
        return self._casts[id(tensor)]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


class Adapted(HasAdapter):
    """A linear layer with an adapter, as PEFT's."""

    def __init__(
        self, base: nn.Linear | QuantizedLinear, r: int, dropout: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, r, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(r, base.out_features, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(inputs)
        if not self.enabled:
            return result
        dtype, quantized = result.dtype, isinstance(self.base, QuantizedLinear)
        if isinstance(self.base, FourBitLinear):
            result = result.clone()
        # PEFT asks for autocast on a GPU, also where there is none.
        casts = not (quantized and Autocast.entered and inputs.device.type != "cpu")
        if casts:
            inputs = inputs.to(self.lora_a.weight.dtype)
        added = self.lora_b(self.lora_a(self.dropout(inputs))) * 2.0
        if quantized and casts:
            added = added.to(dtype)
        result = result + added
        return result.to(dtype) if casts else result


class Adapters(NamedTuple):
    """The adapters that a model is to have."""

    modules: str | Sequence[str]
    """The linear layers that get some, by name, ``all-linear`` or ``linear-layers``."""
    r: int
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    parameters: Sequence[str] = ()
    """The parameters that get some, by the ends of their names."""


def adapt(model: Any, adapters: Adapters) -> None:
    """Freeze a model, and add adapters to the linear layers that are named; all but the head. What experts
    have instead of linear layers is taken for these as PEFT does."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, QuantizedLinear)) and module is not head
    }
    names = {name.rpartition(".")[2] for name in layers}
    everywhere = adapters.modules in (ALL_LINEAR, LINEAR_LAYERS)
    asked = names if everywhere else set(adapters.modules)
    wanted, ranks = parameter_targets(model, asked, adapters.modules == ALL_LINEAR, adapters.r)
    ranks |= dict.fromkeys(adapters.parameters, adapters.r)
    if unknown := sorted(wanted - names):
        raise UsageError(
            f"target_modules: {', '.join(unknown)} is not among the model's linear layers. Use some of "
            f"{', '.join(sorted(names))}, or {ALL_LINEAR}."
        )
    if ranks and adapters.dropout:
        raise UsageError(
            f"lora_dropout: {adapters.dropout}, but the inputs of {', '.join(ranks)} cannot be dropped apart "
            "from the rest, so PEFT refuses it. Set lora_dropout=0, or name other target_modules."
        )
    adapt_parameters(model, ranks, adapters.dtype)
    for name, module in layers.items():
        parent, _, last = name.rpartition(".")
        if last in wanted:
            adapted = Adapted(module, adapters.r, adapters.dropout, adapters.dtype)
            setattr(model.get_submodule(parent), last, adapted)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    adapted = [module for module in model.modules() if isinstance(module, HasAdapter)]
    for module in adapted:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enabled = True


def flat(hidden: torch.Tensor, last: int | None = None) -> torch.Tensor:
    """The hidden states of all positions, one after the other; on a GPU, only of the ``last`` ones of each
    row, if there is such a number."""
    if hidden.device.type == "cpu":
        return hidden.reshape(-1, hidden.shape[-1])
    # On a GPU, TRL picks positions by a mask, which torch turns into their numbers.
    rows, length, _ = hidden.shape
    count = last or length
    at = torch.arange(rows * count, device=hidden.device)
    return hidden[at // count, at % count + (length - count)]


def preference_loss(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    chosen, rejected = (policy.sum(1) - reference.sum(1)).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def policy_loss(
    policy: torch.Tensor, advantages: torch.Tensor, with_reference: bool
) -> torch.Tensor:
    """The loss of TRL's GRPOTrainer, with the memory of its clipped ratios and of its divergence from the
    reference; that of RLOOTrainer, which has one ratio for each row, takes less."""
    ratio = (policy - policy.detach()).exp()
    each = advantages.unsqueeze(1)
    loss = -torch.min(ratio * each, ratio.clamp(0.8, 1.2) * each)
    if with_reference:
        behind = torch.zeros_like(policy) - policy
        loss = loss + 0.1 * (behind.exp() - behind - 1)
    return loss.mean()


class TiledLogProbs(torch.autograd.Function):
    """Log-probabilities of tokens without all logits at once: in tiles, which backward computes again.

    With the memory of TRL's, and without its values: nothing runs. On a GPU, a kernel reduces a tile in
    place. On a CPU, operations of torch do, and hold so many bytes for each logit of the tile at most.
    """

    TOKENS, COLUMNS = TILE_TOKENS, TILE_COLUMNS
    FORWARD, BACKWARD = 12, 29

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        compute_in: torch.dtype,
    ) -> torch.Tensor:
        sums = torch.zeros(7, len(hidden), device=hidden.device)
        with fake_device.repeated(_times(hidden)):
            for tile, part, columns, *_ in _tiles(hidden, weight, compute_in):
                torch.mm(part, weight[columns].to(compute_in).t(), out=tile)
                _reduce(tile, TiledLogProbs.FORWARD)
        log_z, entropy = sums[0] + sums[1], sums[0] - sums[2]
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.compute_in = compute_in
        return sums[6] - log_z

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        hidden, weight, *_ = ctx.saved_tensors
        of_hidden, of_weight = (
            torch.zeros(one.shape, device=one.device) if needed else None
            for one, needed in zip((hidden, weight), ctx.needs_input_grad, strict=False)
        )
        with fake_device.repeated(_times(hidden)):
            for tile, part, columns, rows in _tiles(hidden, weight, ctx.compute_in):
                piece = weight[columns].to(ctx.compute_in)
                torch.mm(part, piece.t(), out=tile)
                _reduce(tile, TiledLogProbs.BACKWARD)
                if of_hidden is not None:
                    _add_product(of_hidden[rows], tile, piece)
                if of_weight is not None:
                    _add_product(of_weight[columns], tile.t(), part)
        of_hidden, of_weight = (
            None if grad is None else grad.to(one.dtype)
            for grad, one in ((of_hidden, hidden), (of_weight, weight))
        )
        return of_hidden, of_weight, None, None


def _times(hidden: torch.Tensor) -> float:
    """How many tiles of tokens there are, of which only the first is done."""
    return max(1.0, len(hidden) / TiledLogProbs.TOKENS)


def _tiles(
    hidden: torch.Tensor, weight: torch.Tensor, compute_in: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice, slice]]:
    """The memory for each tile's logits, the hidden states that they are the product of, and its columns and
    rows. There are tiles of the first tokens only: later ones take as much, one after the other."""
    rows = slice(min(len(hidden), TiledLogProbs.TOKENS))
    memory = torch.empty(rows.stop, TiledLogProbs.COLUMNS, dtype=compute_in, device=hidden.device)
    part = hidden[rows].to(compute_in)
    for column in range(0, len(weight), TiledLogProbs.COLUMNS):
        columns = slice(column, min(column + TiledLogProbs.COLUMNS, len(weight)))
        yield memory[:, : columns.stop - column], part, columns, rows


def _reduce(tile: torch.Tensor, bytes_each: int) -> None:
    if tile.device.type == "cpu":
        torch.empty(tile.numel() * bytes_each, dtype=torch.uint8)
    else:
        tile.mul_(1)  # as much is read and written


def _add_product(total: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """Add a product to a sum in fp32; on a GPU, the product is one of 16 bits and added in fp32 at once."""
    if total.device.type == "cpu":
        total.addmm_(one.float(), other.float())
    else:
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
