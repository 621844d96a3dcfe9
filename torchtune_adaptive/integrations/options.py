"""What a user may choose."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_adaptive.common import arguments


@dataclass(frozen=True)
class Adaptive:
    """How a trainer chooses its micro-batches, and recovers when memory runs out.

    Raises:
        UsageError: an option is not valid; before a model is loaded or data are tokenized.
    """

    memory_limit: int | str | None = None
    """The most capacity that this process may have, such as ``"24GiB"``. A search on a CPU needs it."""
    ceiling: int | None = None
    """The most rows in a micro-batch; by default, those of a step. With ``tokens``, of the longest rows."""
    headroom: float = 0.05
    """The share of the capacity that must stay free in the search."""
    grow_back_after: int | None = 100
    """Steps without trouble after which a size that failed is tried again; None: never."""
    search: bool = True
    """Whether micro-batches have the size that a search finds before the first step; otherwise that of
    ``per_device_train_batch_size``, until memory runs out."""
    tokens: bool = False
    """Whether a micro-batch has as many tokens, padding included, as that size has of the longest row: more
    rows where they are shorter."""

    def __post_init__(self) -> None:
        arguments.memory("memory_limit", self.memory_limit)
        arguments.share("headroom", self.headroom)
        for name in ("ceiling", "grow_back_after"):
            if getattr(self, name) is not None:
                arguments.whole(name, getattr(self, name))
        for name in ("search", "tokens"):
            arguments.one_of(name, getattr(self, name), (True, False))
