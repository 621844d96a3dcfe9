"""Rows of a rollout: all that lasts of it, on the host. And the random numbers that they are sampled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence


@dataclass(eq=False)
class Row:
    """A prompt and the response to it, with what the phases have found out about them.

    All tensors are one-dimensional and on the host. What no phase has set yet is None.
    """

    index: int
    """Its place in the rollout, among the rows of all ranks."""
    prompt: Sequence[int]
    draws: torch.Tensor
    """Uniform numbers in [0, 1), one for each token of the longest response."""
    data: Any = None
    """What the dataset says besides the prompt, such as the right answer."""
    response: torch.Tensor | None = None
    """Tokens up to the first stop token, which is included."""
    stopped: bool = False
    """Whether the response ends with a stop token."""
    old: torch.Tensor | None = None
    """Log-probabilities of the response's tokens, by the policy that generated it."""
    reference: torch.Tensor | None = None
    """The same by the reference."""
    values: torch.Tensor | None = None
    """The values before each of the response's tokens, and after the last, where that counts."""
    scores: torch.Tensor | None = None
    """What a reward model says before each of the response's tokens, and after the last, where it counts."""
    reward: float = 0.0
    advantages: torch.Tensor | float | None = None
    """Of each token of the response, or one for all of them."""
    returns: torch.Tensor | None = None
    """What ``values`` are to become."""

    @property
    def length(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(known(self.response))


_NUMBERS = {
    "old": "response",
    "reference": "response",
    "advantages": "response",
    "values": "valued",
    "returns": "valued",
}
"""The numbers of rows that batches have, each with the mask of the positions where it has them."""


def collate(rows: Sequence[Row], padding_id: int) -> dict[str, torch.Tensor]:
    """A batch of rows, padded on the right: it needs no mask of attention, and no positions.

    Every tensor has a place for each token. What belongs to a prediction stands where it is made, one place
    before the token that is predicted. So ``response`` is true where a token of the response is predicted,
    and ``valued``, if rows have values, where these count. The rest is as in ``Row``, as far as rows have it.
    """
    whole = [torch.cat([torch.as_tensor(row.prompt), known(row.response)]) for row in rows]
    tokens = pad_sequence(whole, batch_first=True, padding_value=padding_id)
    batch = {
        "tokens": tokens,
        "response": _places(rows, tokens, [len(known(r.response)) for r in rows]),
    }
    if rows[0].values is not None:
        batch["valued"] = _places(rows, tokens, [len(known(row.values)) for row in rows])
    for name, mask in _NUMBERS.items():
        if getattr(rows[0], name) is not None:
            numbers = torch.cat([_spread(row, name) for row in rows])
            batch[name] = torch.zeros(tokens.shape).masked_scatter_(batch[mask], numbers)
    return batch


def _places(rows: Sequence[Row], tokens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The mask of as many places in each row, from where its response is predicted."""
    place = torch.arange(tokens.shape[1])
    first = torch.tensor([len(row.prompt) - 1 for row in rows])[:, None]
    return (first <= place) & (place < first + torch.tensor(lengths)[:, None])


def _spread(row: Row, name: str) -> torch.Tensor:
    """A row's numbers, one for each place of their mask."""
    numbers = getattr(row, name)
    if isinstance(numbers, torch.Tensor):
        return numbers.float()
    return torch.full((len(known(row.response)),), float(numbers))


def known(numbers: torch.Tensor | None) -> torch.Tensor:
    """What a phase has set."""
    assert numbers is not None, "an earlier phase sets it"
    return numbers


def longest_rows(number: int, prompt: int, response: int, values: bool = False) -> list[Row]:
    """Rows as long as rows can be, with every number that a phase may need: for trials.

    Prompts and responses have so many tokens, and ``values`` says whether there are values and returns.
    """
    zeros = torch.zeros(response)
    return [
        Row(
            index,
            prompt=[0] * prompt,
            draws=zeros.double(),
            response=torch.zeros(response, dtype=torch.int64),
            old=zeros,
            reference=zeros,
            advantages=zeros,
            values=zeros if values else None,
            returns=zeros if values else None,
        )
        for index in range(number)
    ]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is no device's memory, not even the simulated device's."""
    return torch.from_numpy(tensor.detach().cpu().numpy().copy())


def draws(seed: int, rollout: int, row: int, tokens: int) -> torch.Tensor:
    """The uniform numbers of a row, in [0, 1): one for each token that it may get.

    They depend on nothing else, so neither on which rows are sampled beside it nor on what was sampled
    before. There is no state to save, or to restore after a trial. For more ``tokens``, the first numbers
    are the same. ``row`` is its index among those of all ranks.
    """
    return torch.from_numpy(_generator(seed, rollout, row).random(tokens))


def shuffled(seed: int, rollout: int, epoch: int, rank: int, rows: int) -> list[int]:
    """The order in which a rank trains on its rows of a rollout, for the first time in ``epoch`` 0."""
    return _generator(seed, rollout, rank, 1 + epoch).permutation(rows).tolist()


def _generator(seed: int, rollout: int, *place: int) -> np.random.Generator:
    # It counts, so that every place has one in its sequence. Not torch's generator: on a CPU, that takes 32
    # bits of a seed, and among a million rows some would be twins.
    counter = [0, *place, 0, 0][:4]
    return np.random.Generator(np.random.Philox(key=[seed, rollout], counter=counter))
