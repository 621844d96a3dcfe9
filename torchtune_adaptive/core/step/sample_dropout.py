"""Dropout whose random numbers belong to samples: a function of the seed, the layer's name, the step, the
sample, and the place in its row.

No generator is used: the number of each element is a hash of its place, begun with a key of its row. So it is
the same on any number of ranks, in micro-batches of any size and padding, in a retry and when it is computed
again in backward. Nothing of a mask is kept: backward computes it from the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import private
from torchtune_adaptive.core.ranks.supported import wrapped_in
from torchtune_adaptive.core.rows.permutation import mixed

Drop: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int, float], torch.Tensor]
"""Drops elements of rows, given the two keys of each row, the least number of an element that is kept, and
the factor of what is kept."""

_PART = 1 << 16
_MOST_PARTS = 16
"""Elements in a part, of which the temporaries fit a CPU's cache; and the parts that there are at most."""

_CANNOT_BE_KEYED = (
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_INSIDE = ("attn_dropout", "attention_dropout", "dropout_p", "dropout")
"""Names of attributes by which modules drop out in their own way, such as inside of attention."""
_ADDED_BY_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_forward_module"}
"""Parts of names that come from ``torch.compile``, torch's checkpointing, and Lightning Fabric."""
_ROWS_POSITIONS_COLUMNS = 3


def _mixed(number: torch.Tensor) -> torch.Tensor:
    """A hash of each number of 32 bits, in place: the last mix of MurmurHash3."""
    number ^= (number >> 16) & 0xFFFF  # torch shifts the sign in
    number *= -0x7A143595  # 0x85EBCA6B
    number ^= (number >> 13) & 0x7FFFF
    number *= -0x3D4D51CB  # 0xC2B2AE35
    number ^= (number >> 16) & 0xFFFF
    return number


def _counted_from(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """For each of these numbers, a row of so many: itself, and those that follow."""
    # Where shapes are dynamic, inductor's kernels for GPUs count in 64 bits and go on with 64, although these
    # are numbers of 32, unless there is a cast (torch 2.11).
    dtype = torch.int64 if torch.compiler.is_compiling() else torch.int32
    places = torch.arange(count, dtype=dtype, device=numbers.device)
    return (numbers[:, None] + places).to(torch.int32)


def _of_positions(row_keys: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random numbers for each position of each row."""
    first = _mixed(_counted_from(row_keys[:, 0], positions))
    return first.flatten(), _mixed(row_keys[:, 1:] ^ first).flatten()


def _dropped(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, least: int, factor: float
) -> torch.Tensor:
    """Elements of positions, each of which has two random numbers; the shape is that of a matrix."""
    # The second number tells apart positions whose first ones are close.
    number = _mixed(_counted_from(first, x.shape[1])) ^ second[:, None]
    return torch.where(number >= least, x * factor, 0)


def drop(x: torch.Tensor, row_keys: torch.Tensor, least: int, factor: float) -> torch.Tensor:
    """Drop elements, all at once: to be compiled."""
    if not x.numel():
        return x.clone()
    positions = x.reshape(-1, x.shape[-1])
    numbers = _of_positions(row_keys, len(positions) // len(x))
    return _dropped(positions, *numbers, least, factor).view_as(x)


def drop_by_kernel(backend: str | Callable[..., Any] = "inductor") -> Drop:
    """Gives what drops the same elements by a compiled kernel, which needs no temporaries of that size.

    It is compiled for each width, as kernels divide by it, and for all numbers of rows and positions. Left
    alone, torch would compile it for each of these until it had done so too often, and then no more.
    """
    compiled = torch.compile(drop, dynamic=False, backend=backend)

    def drop_compiled(
        x: torch.Tensor, row_keys: torch.Tensor, least: int, factor: float
    ) -> torch.Tensor:
        x = x.detach().contiguous()  # or it is compiled for each way to lie in memory as well
        private.compile_for_all_sizes(x, range(x.dim() - 1))
        private.compile_for_all_sizes(row_keys, [0])
        return compiled(x, row_keys, least, factor)

    return drop_compiled


def drop_in_parts(
    x: torch.Tensor, row_keys: torch.Tensor, least: int, factor: float
) -> torch.Tensor:
    """Drop the same elements part by part, so that temporaries are small without a compiler."""
    if not x.numel():
        return x.clone()
    positions = x.reshape(-1, x.shape[-1])
    numbers = _of_positions(row_keys, len(positions) // len(x))
    parts = min(_MOST_PARTS, -(-x.numel() // _PART))
    result = torch.empty_like(positions)
    split = (each.tensor_split(parts) for each in (result, positions, *numbers))
    for part, of_part, first, second in zip(*split, strict=True):
        part.copy_(_dropped(of_part, first, second, least, factor))
    return result.view_as(x)


class _Dropped(torch.autograd.Function):
    """Drops the same elements of a gradient as of what it is the gradient of, and keeps the keys only."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, keys: torch.Tensor, least: int, factor: float, drop: Drop
    ) -> Any:
        ctx.save_for_backward(keys)
        ctx.rest = least, factor, drop
        return drop(x, keys, least, factor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        dropped = _Dropped.apply(*gradients, *ctx.saved_tensors, *ctx.rest)
        return dropped, None, None, None, None


class SampleDropout(nn.Dropout):
    """Takes the place of ``nn.Dropout`` where the first dimension is that of rows.

    Args:
        p: the share that is dropped.
        drop: the function that does it.
    """

    def __init__(self, p: float, drop: Drop) -> None:
        super().__init__(p)
        self._drop = drop
        # Computed here: torch 2.13 compiles the first share into code for all of them.
        self._least = min(int(p * 2**32) - 2**31, 2**31 - 1)
        self._factor = 1 / (1 - p) if p < 1 else 0.0
        self.row_keys: torch.Tensor | None = None
        """Two numbers for each row of the micro-batch that is running; None for rows without a sample, as in
        a trial."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        keys = self.row_keys
        if x.dim() > _ROWS_POSITIONS_COLUMNS:
            raise UsageError(
                "dropout: by sample, a row has positions, and each position has columns, but a layer drops "
                f"elements of a {' x '.join(map(str, x.shape))} tensor, as inside of attention. Their places "
                "would follow the padding. Use torch's dropout instead, or set this one to 0."
            )
        if keys is None:
            places = torch.arange(2 * len(x), dtype=torch.int32, device=x.device)
            keys = _mixed(places).view(-1, 2)
        elif len(keys) != len(x):
            raise UsageError(
                f"dropout: by sample, the first dimension must be that of the {len(keys)} rows of a "
                f"micro-batch, but a layer drops elements of a {' x '.join(map(str, x.shape))} tensor. "
                "Use torch's dropout instead."
            )
        if torch.compiler.is_compiling():  # the compiler decides what backward computes again
            return drop(x, keys, self._least, self._factor)
        result: torch.Tensor = _Dropped.apply(x, keys, self._least, self._factor, self._drop)
        return result


def drop_by_sample(model: nn.Module, compiled: bool) -> None:
    """Let a model drop by sample, wherever it has ``nn.Dropout``.

    Raises:
        UsageError: it drops out in another way as well, whose random numbers belong to no sample.
    """
    drops = drop_by_kernel() if compiled else drop_in_parts
    for name, share in shares_by_sample(model).items():
        _replace(model, name, SampleDropout(share, drops))


def shares_by_sample(model: nn.Module) -> dict[str, float]:
    """The share that each layer of a model drops, by its name.

    Raises:
        UsageError: it drops out in another way as well, whose random numbers belong to no sample.
    """
    shares: dict[str, float] = {}
    for name, module in model.named_modules():
        if type(module) in (nn.Dropout, SampleDropout):
            if module.p > 0:
                shares[name] = module.p
            continue
        inside = [key for key in _INSIDE if _is_share(getattr(module, key, 0))]
        if inside or (isinstance(module, (nn.Dropout, *_CANNOT_BE_KEYED)) and module.p > 0):
            what = f"{name}.{inside[0]}" if inside else f"{name} ({type(module).__name__})"
            raise UsageError(f"{what}: its random numbers cannot belong to samples.")
    return shares


def drop_by_torch(model: nn.Module) -> None:
    """Let a model that drops by sample drop as before."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SampleDropout):
            _replace(model, name, nn.Dropout(module.p))


def _replace(model: nn.Module, name: str, by: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    by.train(model.get_submodule(name).training)
    model.get_submodule(parent).add_module(own, by)


def _is_share(value: object) -> bool:
    return isinstance(value, float) and value > 0


class DropoutKeys:
    """Says to the layers of a model which rows a micro-batch has.

    Args:
        model: a model that drops by sample.
        seed: the seed of the run.
        sequences: the sequences of each sample. A micro-batch has the first ones of all samples, then the
            second ones.
    """

    def __init__(self, model: nn.Module, seed: int, sequences: int, device: torch.device) -> None:
        named = _named(model)
        self._layers = [layer for _, layer in named]
        self._of_layers = _hashed(f"{seed} {name}" for name, _ in named)
        self._sequences, self._device = range(sequences), device
        self._is_sure = False
        """Whether nothing else draws random numbers."""

    @contextmanager
    def running(self, epoch: int, used: int, samples: Sequence[int]) -> Iterator[None]:
        """A context in which a micro-batch runs forward and backward.

        Args:
            epoch: the epoch.
            used: the samples of the epoch that steps before this one have used, over all ranks.
            samples: those of the micro-batch; none if its rows do not count.
        """
        before = None if self._is_sure else _generators(self._device)
        if samples:
            self._set(self.of(epoch, used, samples).to(self._device).unbind())
        try:
            yield
        finally:
            self._set([None] * len(self._layers))
        if before is not None and not torch.equal(before, _generators(self._device)):
            raise UsageError(
                "dropout: by sample, but the model draws random numbers in other ways than by nn.Dropout, "
                "such as torch.nn.functional.dropout, or noise. These belong to no sample. Use torch's "
                "dropout instead."
            )
        self._is_sure = True

    def of(self, epoch: int, used: int, samples: Sequence[int]) -> torch.Tensor:
        """The two keys of each row in each layer."""
        rows = (f"{epoch} {used} {sample} {n}" for n in self._sequences for sample in samples)
        keys = mixed(self._of_layers[:, None] + _hashed(rows))
        return torch.from_numpy(keys.view(np.int32).reshape(*keys.shape, 2))

    def _set(self, keys: Sequence[torch.Tensor | None]) -> None:
        for layer, of_layer in zip(self._layers, keys, strict=True):
            layer.row_keys = of_layer


def _named(model: nn.Module) -> list[tuple[str, SampleDropout]]:
    """The layers that drop by sample, with the names that they have where nothing is wrapped."""
    wrapped = wrapped_in(model)
    outer = next((f"{n}.module." for n, m in model.named_modules() if m is wrapped), "").lstrip(".")
    found = []
    for name, module in model.named_modules():
        if isinstance(module, SampleDropout):
            parts = name.removeprefix(outer).split(".")
            found.append((".".join(p for p in parts if p not in _ADDED_BY_WRAPPERS), module))
    return found


def _generators(device: torch.device) -> torch.Tensor:
    """The state of the generators that a model on a device draws from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


def _hashed(texts: Iterator[str]) -> npt.NDArray[np.uint64]:
    digests = (blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
