"""Completions as rows: generated in parts with the draws of the whole batch, taken out of batches, and put
together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import Generators

T = TypeVar("T")


@dataclass(frozen=True)
class Completion:
    """A row of a batch of completions."""

    batch: Mapping[str, Any]
    """The batch, on the host: tensors with a row for each completion, and numbers for all of them."""
    row: int


def rows_of(batch: Mapping[str, Any]) -> list[Completion]:
    """The completions in a batch."""
    for name, value in batch.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name}: a {type(value).__name__} in a batch of completions cannot be split into rows. Only "
                "prompts of text are supported."
            )
    kept = {name: value if value is None else value.detach().cpu() for name, value in batch.items()}
    ids: torch.Tensor = batch["completion_ids"]
    return [Completion(kept, row) for row in range(len(ids))]


def together(rows: Sequence[Completion]) -> dict[str, Any]:
    """A batch of completions that were generated together, so that they are equally long."""
    return {
        name: value
        if value is None or not value.dim()
        else torch.stack([each.batch[name][each.row] for each in rows])
        for name, value in rows[0].batch.items()
    }


def longest(like: Completion, prompt: int, completion: int) -> Completion:
    """A completion that has as many tokens as there may be, in the prompt and after it."""
    width = like.batch["completion_ids"].size(1)

    def widened(name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None or not value.dim():
            return value
        if value.dim() == 1 or (value.size(1) != width and not name.startswith("prompt")):
            return value[:1]
        # Masks of ones and tokens of number 1, none of which is padding; log-probabilities of 0.
        tokens = prompt if name.startswith("prompt") else completion
        return value.new_full((1, tokens), not value.is_floating_point())

    return Completion({name: widened(name, value) for name, value in like.batch.items()}, 0)


class Draws:
    """The random numbers of the rows of a batch, whichever of them are generated together.

    ``generate`` samples a token of each row by one ``torch.multinomial`` over all rows. So a row's draw
    follows from its place in the batch and the state before. Each part of the batch begins with the state
    that the whole would begin with, and samples as if all rows were there. Afterward the state is that of
    the part which has drawn most often, as it would be for the whole.

    What else is drawn at random, such as dropout, follows the size of the part.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._before = self._after = Generators(device)
        self._most = -1

    def of(self, part: Sequence[int], generate: Callable[[], T]) -> T:
        """Generate a part of the rows, given their places in the batch."""
        self._before.restore()
        if len(part) == self._rows:  # nothing to look at in each operation
            return generate()
        with _AmongAll(part, self._rows) as sampling:
            made = generate()
        if sampling.times > self._most:
            self._most, self._after = sampling.times, Generators(self._device)
        return made

    def end(self) -> None:
        """Go on as after the whole batch."""
        if self._most >= 0:
            self._after.restore()


class _AmongAll(TorchFunctionMode):
    """A context in which ``torch.multinomial`` draws for some rows of a batch as it would among all."""

    def __init__(self, part: Sequence[int], rows: int) -> None:
        super().__init__()
        self._part, self._rows = list(part), rows
        self.times = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.multinomial or not args or args[0].shape[:-1] != (len(self._part),):
            return func(*args, **kwargs)
        self.times += 1
        some, *rest = args
        whole = some.new_ones(self._rows, some.size(-1))  # the rows of others may draw anything
        whole[self._part] = some
        return func(whole, *rest, **kwargs)[self._part]
