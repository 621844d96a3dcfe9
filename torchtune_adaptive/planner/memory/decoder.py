"""A decoder and how it is trained: the facts that an estimate of memory is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HALF, SINGLE = 2, 4
"""Bytes of a number: in bf16 or fp16, and in float32, in which norms, positions and losses are computed."""
NF4 = 0.5 + 1 / 64
"""Bytes of a number in NF4: four bits, and a byte to scale each 64."""


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    embed: int
    intermediate: int
    vocabulary: int
    longest: int
    """The most tokens in a row."""
    positions: int
    """Bytes of the tables of positions, for each position and each number of a head's width."""
    tied: bool = False
    """Whether the last projection has the weights of the embedding."""
    gemma2: bool = False
    """Whether it is Gemma 2: the outputs of attention and of the MLP are normalized, too, and scores are
    capped, so they are whole matrices."""

    @property
    def queries(self) -> int:
        """The width of all heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def table(self) -> int:
        """The numbers of the embedding."""
        return self.vocabulary * self.embed

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """The inputs and outputs of a layer's projections."""
        return {
            "q_proj": (self.embed, self.queries),
            "k_proj": (self.embed, self.keys),
            "v_proj": (self.embed, self.keys),
            "output_proj": (self.queries, self.embed),
            "w1": (self.embed, self.intermediate),
            "w3": (self.embed, self.intermediate),
            "w2": (self.intermediate, self.embed),
        }


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """How a decoder is trained."""

    ranks: int = 1
    adapted: frozenset[str] | None = None
    """The projections with adapters; None if all weights are trained."""
    adapter_rank: int = 0
    dropout: bool = False
    """Whether adapters have dropout."""
    quantized: bool = False
    """Whether the weights of layers are in NF4."""
    state: float = 2 * HALF
    """Bytes of the optimizer's state for each number that is trained."""
    copied: float = 0
    """Bytes of what the optimizer copies for a moment, for each such number."""
    in_backward: bool = False
    """Whether each weight is changed as soon as it has its gradient."""
    checkpointed: Callable[[int], bool] = bool
    """Whether a layer, by its number from 1, is computed again in backward."""
    offloads: bool = False
    """Whether what backward needs waits on the host."""
    chunks: int = 8
    """Chunks of logits."""
    apart: frozenset[str] = frozenset()
    """What FSDP gathers by itself: ``tok_embeddings``, ``output``."""
    micro_batches: int = 1
    reshards: bool = True
    """Whether FSDP frees weights after forward."""
    on_host: bool = False
    """Whether weights wait on the host, where the optimizer changes them."""

    @property
    def trains_all(self) -> bool:
        return self.adapted is None

    @property
    def sharded(self) -> bool:
        return self.ranks > 1 or self.on_host

    def adapts(self, name: str) -> bool:
        """Whether a projection has an adapter."""
        return self.adapted is not None and name in self.adapted

    def keeps_input(self, name: str) -> bool:
        """Whether the gradient of a projection's weights needs its input."""
        return self.trains_all or (self.adapts(name) and not self.dropout)

    def weights(self, name: str, inputs: int, outputs: int, in_layer: bool = True) -> UnitWeights:
        """The weights of a projection."""
        numbers, each = inputs * outputs, NF4 if self.quantized and in_layer else HALF
        if not self.adapts(name):
            return UnitWeights((each * numbers,), numbers if self.trains_all else 0)
        adapter = self.adapter_rank * (inputs + outputs)
        return UnitWeights((each * numbers, HALF * adapter), adapter)


@dataclass(frozen=True)
class UnitWeights:
    """Weights that are gathered together."""

    sizes: tuple[float, ...] = ()
    """Bytes of each."""
    trained: int = 0
    """Numbers that are trained."""

    def __add__(self, other: UnitWeights) -> UnitWeights:
        return UnitWeights(self.sizes + other.sizes, self.trained + other.trained)
