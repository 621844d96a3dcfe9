"""What a step sums over all ranks, and among it what gradient noise is estimated from."""

from __future__ import annotations

from enum import IntEnum

import torch

from torchtune_adaptive.core.sizes.noise import NoiseSums


class Total(IntEnum):
    """What the ranks sum in a step's one all-reduce."""

    TOKENS = 0
    LOSS = 1
    SQUARED_GRADIENT_NORM = 2
    FAILED = 3
    RETRIES = 4
    # For gradient noise; present even where it is not measured, so that measuring changes no sum's rounding.
    SMALL = 5
    SMALL_TOKENS = 6
    SMALL_TOKENS_SQUARED = 7
    ROWS = 8
    STOP = 9


class SmallBatches:
    """Squared norms of this rank's gradients of small batches, for gradient noise; only looks at gradients.

    FSDP reduces the gradient of each micro-batch by itself, so the input of its reduce-scatter is this rank's
    gradient of that micro-batch alone. With nothing to reduce over, a step has one small batch: the first
    micro-batch, whose gradient stands alone until the second one's is added.
    """

    def __init__(self, device: torch.device) -> None:
        self._reduced = torch.zeros((), dtype=torch.float64, device=device)  # their squared norms
        self.begin()

    def begin(self) -> None:
        self._tokens: list[int] = []  # of each micro-batch
        self._rows = 0
        self._reduces = False
        self.first: torch.Tensor | None = None  # squared norm of the first micro-batch's gradient

    def add(self, tokens: int, rows: int) -> None:
        self._tokens.append(tokens)
        self._rows += rows

    def reducing(self, gradient: torch.Tensor) -> None:
        """Called by FSDP with gradients of some parameters; must not make the host wait."""
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        # The first of a step overwrites the previous step's sum: zeroing it beforehand would happen on
        # another stream, and after a failure nothing orders the two.
        if self._reduces:
            self._reduced.add_(square)
        else:
            self._reduced.copy_(square)
        self._reduces = True

    def reducing_all(self, gradients: list[torch.Tensor]) -> None:
        """Called with all gradients of a replica, which are those of one small batch: its micro-batches'."""
        for gradient in gradients:
            self.reducing(gradient)
        self._tokens = [sum(self._tokens)]

    def only_first_is_left(self) -> bool:
        """Whether, before a forward pass, the accumulated gradient is the step's one small batch."""
        return len(self._tokens) == 1 and not self._reduces

    @property
    def measured(self) -> bool:
        return self._reduces or self.first is not None

    def fill(self, totals: torch.Tensor) -> None:
        """Add this rank's sums to the totals."""
        totals[Total.ROWS].fill_(float(self._rows))
        if self._reduces:
            totals[Total.SMALL].copy_(self._reduced)
            totals[Total.SMALL_TOKENS].fill_(float(sum(self._tokens)))
            totals[Total.SMALL_TOKENS_SQUARED].fill_(float(sum(n * n for n in self._tokens)))
        elif self.first is not None:
            totals[Total.SMALL].copy_(self.first)
            totals[Total.SMALL_TOKENS].fill_(float(self._tokens[0]))

    def sums(self, totals: list[float], averaged_over: int) -> NoiseSums | None:
        """The sums over all ranks; None if no batch was smaller than the step."""
        tokens, small, small_tokens = (
            totals[at] for at in (Total.TOKENS, Total.SMALL, Total.SMALL_TOKENS)
        )
        small_tokens_squared = totals[Total.SMALL_TOKENS_SQUARED]
        if not self._reduces:  # the one small batch spans all ranks
            small, small_tokens_squared = small * averaged_over**2, small_tokens**2
        if not 0 < small_tokens_squared < tokens**2:
            return None
        return NoiseSums(
            small=small,
            small_tokens=small_tokens,
            small_tokens_squared=small_tokens_squared,
            # FSDP reduces to the mean over ranks, not to their sum.
            big=totals[Total.SQUARED_GRADIENT_NORM] * averaged_over**2,
            tokens=tokens,
            tokens_squared=tokens**2,
            rows=totals[Total.ROWS],
        )
