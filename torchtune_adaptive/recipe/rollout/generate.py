"""Generation of responses: each row is sampled by itself, whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torchtune.modules import MultiHeadAttention

from torchtune_adaptive.recipe.private import without_compiling
from torchtune_adaptive.recipe.rollout.projection import last_logits_only
from torchtune_adaptive.recipe.rollout.rows import Row, on_host


class Response(NamedTuple):
    """The response to a prompt, on the host."""

    tokens: torch.Tensor
    """Those up to the first stop token, which is included."""
    stopped: bool
    """Whether it ends with a stop token."""


@dataclass
class Generation:
    """Generates responses to prompts, with caches of keys and values that are gone afterward.

    Evaluation mode, and no gradients, are the caller's part.
    """

    model: Any
    """A decoder of torchtune's."""
    padding_id: int
    stop_tokens: Sequence[int]
    max_new: int
    """The tokens of the longest response."""
    temperature: float
    top_k: int | None
    width: int
    """The tokens that prompts are padded to, on the left. It is to be the same for all rows of a rollout, so
    that a row has the same shapes whatever rows are beside it."""
    dtype: torch.dtype
    """That of the caches."""
    device: torch.device

    def alone(self, rows: Sequence[Row]) -> list[Response]:
        """The responses to some prompts, by a model that is whole on this rank: there are no collectives, and
        it ends when these rows have stopped."""
        return self._generate(rows, self.max_new, early=True)

    def together(self, rows: Sequence[Row]) -> list[Response]:
        """The same by a sharded model. Every token gathers its weights, on all ranks: so it never ends early.

        All ranks have as many rows.
        """
        return self._generate(rows, self.max_new, early=False)

    def trial(self, rows: Sequence[Row]) -> list[Response]:
        """The first two tokens of each response: one takes the whole prompt, the other is like all after it.

        Caches are as large as for all of them, so nothing else takes more memory.
        """
        return self._generate(rows, min(2, self.max_new), early=False)

    def _generate(self, rows: Sequence[Row], count: int, early: bool) -> list[Response]:
        tokens, valid, numbers = self._inputs(rows)
        position = (valid.cumsum(1) - 1).clamp_min(0)
        stops = torch.tensor(self.stop_tokens, dtype=tokens.dtype, device=self.device)
        made = tokens.new_full((len(rows), self.max_new), self.padding_id)
        stopped = torch.zeros_like(valid[:, 0])
        first, last = 0, self.width
        with _kv_caches(self, len(rows)), last_logits_only(self.model):
            for at in range(count):
                here = slice(first, last)
                logits = self.model(tokens, input_pos=position[:, here], mask=_mask(valid, here))
                drawn = sampled(logits[:, -1], numbers[:, at], self.temperature, self.top_k)
                made[:, at] = drawn.masked_fill(stopped, self.padding_id)
                stopped |= torch.isin(drawn, stops)
                if early and bool(stopped.all()):
                    break
                tokens, first, last = made[:, at, None], last, last + 1
        return [self._response(row) for row in on_host(made)[:, :count]]

    def _inputs(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompts, padded; the places that are not padding, up to the last that may be generated; draws."""
        padding = [self.width - len(row.prompt) for row in rows]
        padded = [
            [self.padding_id] * n + list(row.prompt) for n, row in zip(padding, rows, strict=True)
        ]
        tokens = torch.tensor(padded, device=self.device)
        places = torch.arange(self.width + self.max_new, device=self.device)
        valid = places >= torch.tensor(padding, device=self.device)[:, None]
        return tokens, valid, torch.stack([row.draws for row in rows]).to(self.device)

    def _response(self, tokens: torch.Tensor) -> Response:
        ends = torch.isin(tokens, torch.tensor(self.stop_tokens, dtype=tokens.dtype))
        if not bool(ends.any()):
            return Response(tokens, False)
        return Response(tokens[: int(ends.int().argmax()) + 1], True)  # the first of them


_ONE = 2.0**52  # a probability of 1 as a whole number, to the last bit of a float64


def _mask(valid: torch.Tensor, here: slice) -> torch.Tensor:
    """What the places ``here`` of each row attend to: those before them without padding, and themselves."""
    places = torch.arange(valid.shape[1], device=valid.device)
    query = places[here, None]
    # Padding attends to itself: a softmax over nothing is NaN.
    return ((places <= query) & valid[:, None]) | (places == query)


def sampled(
    logits: torch.Tensor, numbers: torch.Tensor, temperature: float, top_k: int | None
) -> torch.Tensor:
    """The tokens at which rows' cumulative probabilities pass their numbers.

    Args:
        logits: a row for each sample.
        numbers: of a uniform distribution in [0, 1), in float64.
        temperature: the number that logits are divided by; 0 means the likeliest token.
        top_k: how many of the likeliest tokens may be drawn; None for all.
    """
    # As in torchtune. In float64: in float32, unlikely tokens would be rounded away.
    logits = logits.double() / max(temperature, 1e-5)
    if top_k is not None:
        kept = logits.topk(min(top_k, logits.shape[-1])).values
        logits = logits.masked_fill(logits < kept[:, -1:], -torch.inf)
    # Whole numbers, whose sums have no order: on a GPU that of floats depends on how many rows there are, and
    # torch refuses it in deterministic mode.
    cumulative = logits.softmax(-1).mul_(_ONE).long().cumsum(-1)
    total = cumulative[:, -1:]
    goal = torch.minimum((numbers[:, None] * total).long(), total - 1)
    drawn = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    # Where logits are NaN, any token will do, but it must exist: a GPU does not survive looking up another.
    return drawn.clamp_max(logits.shape[-1] - 1)


@contextmanager
def _kv_caches(generation: Generation, rows: int) -> Iterator[None]:
    """A context in which the model has caches. torchtune's own leaves those of some layers behind if memory
    runs out while it makes them, and its way to delete them wants all to be there."""
    model, length = generation.model, generation.width + generation.max_new
    try:
        with generation.device:
            model.setup_caches(rows, generation.dtype, decoder_max_seq_len=length)
        # Layers would be compiled for each number of rows again, and after a few of them no more: torch has a
        # limit, which is the same for training.
        with without_compiling():
            yield
    finally:
        for module in model.modules():
            if isinstance(module, MultiHeadAttention):
                # Or there would be a place for one, and compiled layers would be others.
                del module.kv_cache
                module.kv_cache, module.cache_enabled = None, False
