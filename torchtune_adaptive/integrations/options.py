"""What a user may choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchtune_adaptive.common import UsageError, arguments

Search = Literal["extrapolate", "bisect", "halve", False]
Dropout = Literal["torch", "sample"]


@dataclass(frozen=True)
class Adaptive:
    """How a trainer chooses its micro-batches, and recovers when memory runs out.

    Raises:
        UsageError: an option is not valid; before a model is loaded or data are tokenized.
    """

    memory_limit: int | str | None = None
    """The most capacity that this process may have, such as ``"24GiB"``. A search on a CPU needs it."""
    ceiling: int | None = None
    """The most rows in a micro-batch; by default, those of a step. With ``token_budget``, of the longest."""
    headroom: float = 0.05
    """The share of the capacity that must stay free in the search."""
    grow_back_after: int | Literal["never"] = 100
    """Steps without trouble after which a size that failed is tried again, or ``"never"``."""
    search: Search = "extrapolate"
    """The search before the first step: ``extrapolate``, ``bisect`` or ``halve``, which find the same. With
    False, micro-batches have ``per_device_train_batch_size`` rows, until memory runs out."""
    token_budget: bool = False
    """Whether a micro-batch has as many tokens, padding included, as that size has of the longest row: more
    rows where they are shorter."""

    fastest: bool = False
    """Whether to choose, too, how many layers are checkpointed: with the micro-batch that fits for all of
    them, its half and its quarter, steps are timed with as few as fit."""
    sync_each_batch: bool = True
    """Whether FSDP2 reduces the gradients of each micro-batch. With False it does so with the last one only,
    as accelerate does: fewer collectives, for the memory of unsharded gradients. The search includes it."""
    dropout: Dropout = "torch"
    """The random numbers of dropout: those of ``torch``, or of the ``sample``: a row's mask is a function of
    ``args.seed``, the layer's name, the step, and the row's place in it; the same on any number of processes
    and in any micro-batch."""
    wait_for_memory: float = 30.0
    """Seconds to wait, in all, where not even one row fits: another process may be the cause."""

    def __post_init__(self) -> None:
        arguments.memory("memory_limit", self.memory_limit)
        arguments.share("headroom", self.headroom)
        if self.ceiling is not None:
            arguments.whole("ceiling", self.ceiling)
        arguments.whole_or_never("grow_back_after", self.grow_back_after)
        arguments.one_of("search", self.search, get_args(Search))
        arguments.one_of("token_budget", self.token_budget, (True, False))
        arguments.one_of("fastest", self.fastest, (True, False))
        if self.fastest and (self.token_budget or not self.search):
            other = "token_budget" if self.token_budget else "search=False"
            raise UsageError(
                f"fastest: not with {other}. It times steps of the size that a search has found."
            )
        arguments.one_of("sync_each_batch", self.sync_each_batch, (True, False))
        arguments.one_of("dropout", self.dropout, get_args(Dropout))
        arguments.seconds("wait_for_memory", self.wait_for_memory)
