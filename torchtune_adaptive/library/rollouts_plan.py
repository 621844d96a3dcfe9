"""The answer of a plan for a step that generates the rows it trains on."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_adaptive.library.planning import Plan
from torchtune_adaptive.library.vllm_engine import EngineNeeds


@dataclass(frozen=True)
class PlannedPhase:
    """The memory of one phase of a step."""

    name: str
    rows: int
    """The rows that are taken at once; 0 where vLLM takes them."""
    peak: int
    """The most memory that the trainer reserves meanwhile, in bytes."""
    beside: int
    """Bytes that vLLM takes meanwhile."""
    usable_bytes: int
    """Usable memory, less what vLLM takes."""
    largest: int
    """The largest ``per_device_train_batch_size`` with which this phase fits; 0 if none does."""
    parts: dict[str, int]
    """Bytes of tensors at the peak, by what they are for."""
    allocated: int = 0
    """The most memory that the trainer's tensors take, in bytes."""
    with_retries: bool = False
    """Whether the peak is above the usable memory, but the phase runs if torch's allocator returns memory in
    the middle of it."""


@dataclass(frozen=True)
class RolloutsPlan(Plan):
    """The memory of a step that generates the rows it trains on.

    ``peak``, ``parts`` and ``usable_bytes`` are those of the phase with the least room, ``largest`` is the
    largest micro-batch with which all of them fit.
    """

    phases: tuple[PlannedPhase, ...] = ()
    """All phases, in their order: each has its ``name``, the ``rows`` that are taken at once, its ``peak``,
    the bytes that vLLM takes ``beside`` it, the ``usable_bytes`` that are left, and the ``largest``
    micro-batch with which it fits."""
    limiting: str = ""
    """The name of the phase with the least room."""
    most_utilization: float | None = None
    """The highest ``vllm_gpu_memory_utilization`` with which ``rows`` fit; None without colocated vLLM."""
    engine: EngineNeeds | None = None
    """What vLLM itself needs, where that is known."""
