"""The memory events of a decoder's layer, written down by hand from what torchtune computes.

Only tensors with a number of bytes for each token, and the gradients of weights, are large. ``keep`` says
whether forward keeps what backward needs: not in the first forward pass of a layer that is checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable

from torchtune_adaptive.planner.memory.decoder import HALF, SINGLE, Decoder, Finetuning
from torchtune_adaptive.planner.memory.recorded_step import Label, MemoryEvent, RecordedStep

MAIN = 0
_LABEL = Label("", "", "")
Block = int
Kept = dict[str, Block]


class WrittenEvents:
    """Allocations and releases, as they are written down."""

    def __init__(self) -> None:
        self.events: list[MemoryEvent] = []
        self.sizes: dict[Block, int] = {}

    def take(self, nbytes: float, stream: int = MAIN) -> Block:
        block = len(self.sizes) + 1
        self.sizes[block] = int(nbytes)
        self.events.append(MemoryEvent(block, int(nbytes), stream))
        return block

    def drop(self, *blocks: Block) -> None:
        self.events += [MemoryEvent(block, -1, MAIN) for block in blocks]

    def briefly(self, *sizes: float) -> None:
        """Blocks that are there together, and only for a moment."""
        self.drop(*[self.take(nbytes) for nbytes in sizes])

    def cut(self) -> RecordedStep:
        """What has been written since the last time."""
        labels = {event.block: _LABEL for event in self.events if event.nbytes >= 0}
        written, self.events = RecordedStep(self.events, labels), []
        return written


class WrittenLayer:
    """The events of one layer; ``own`` is given each gradient of weights."""

    def __init__(
        self,
        events: WrittenEvents,
        decoder: Decoder,
        how: Finetuning,
        rows: int,
        length: int,
        own: Callable[[Block], None],
    ) -> None:
        self._take, self._drop, self._briefly = events.take, events.drop, events.briefly
        self._model, self._how, self._own = decoder, how, own
        self._projections = decoder.projections
        self._length, self._tokens = length, (tokens := rows * length)
        self.thin = HALF * tokens * decoder.embed
        self._wide = HALF * tokens * decoder.queries
        self._narrow = HALF * tokens * decoder.keys
        self._inner = HALF * tokens * decoder.intermediate
        self._scores = HALF * tokens * length * decoder.heads if decoder.gemma2 else 0

    def forward(self, keep: bool) -> tuple[Kept, Block]:
        """What is kept for backward, and the output."""
        how, kept = self._how, Kept()

        def done(needed: bool = True, **blocks: Block) -> None:
            if keep and needed:
                kept.update(blocks)
            else:
                self._drop(*blocks.values())

        h = self.norm("sa_norm", kept, keep)
        q, k, v = (self._project(name, kept, keep) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = self._rotated(q, self._wide), self._rotated(k, self._narrow)
        if self._model.kv_heads < self._model.heads:  # repeated for each query
            k, v = self._instead(k, self._wide), self._instead(v, self._wide)
        attended = self._attend(kept, keep)
        out = self._project("output_proj", kept, keep)
        done(q=q, k=k, v=v, attended=attended)
        if self._model.gemma2:
            out = self._instead(out, self.thin, self.norm("sa_scale", kept, keep))
        x = self._take(self.thin)
        done(any(map(how.keeps_input, ("q_proj", "k_proj", "v_proj"))), h=h)
        h = self.norm("mlp_norm", kept, keep)
        gate = self._project("w1", kept, keep)
        activated = self._take(self._inner)
        done(gate=gate)
        up = self._project("w3", kept, keep)
        product = self._take(self._inner)
        done(activated=activated, up=up)
        down = self._project("w2", kept, keep)
        done(how.keeps_input("w2"), product=product)
        done(any(map(how.keeps_input, ("w1", "w3"))), h_of_mlp=h)
        if self._model.gemma2:
            down = self._instead(down, self.thin, self.norm("mlp_scale", kept, keep))
        result = self._take(self.thin)
        self._drop(x, out, down)
        return kept, result

    def backward(self, kept: Kept) -> None:
        """The gradient of the output becomes that of the input, in place."""

        def done(*names: str) -> None:
            self._drop(*[kept.pop(name) for name in names if name in kept])

        self._norm_after("mlp_scale", kept)
        of_product = self._of_input("w2", kept)
        done("product")
        of_activated, of_up = self._take(self._inner), self._take(self._inner)
        done("activated", "up")
        self._drop(of_product)
        of_h = self._of_input("w3", kept)
        self._drop(of_up)
        of_gate = self._take(self._inner)
        done("gate")
        self._drop(of_activated)
        of_h = self._sum(of_h, self._of_input("w1", kept))
        done("h_of_mlp")
        self._drop(of_gate)
        self.norm_backward("mlp_norm", kept, of_h)

        self._norm_after("sa_scale", kept)
        of_attended = self._of_input("output_proj", kept)
        of_q, of_k, of_v = (self._take(self._wide) for _ in range(3))
        self._attend_backward(kept)
        done("attended", "q", "k", "v")
        self._drop(of_attended)
        if self._model.kv_heads < self._model.heads:
            of_v, of_k = self._instead(of_v, self._narrow), self._instead(of_k, self._narrow)
        self._rotate_backward(self._narrow)
        of_h = self._of_input("v_proj", kept)
        of_h = self._sum(of_h, self._of_input("k_proj", kept))
        self._drop(of_v, of_k)
        self._rotate_backward(self._wide)
        of_h = self._sum(of_h, self._of_input("q_proj", kept))
        self._drop(of_q)
        done("h")
        self.norm_backward("sa_norm", kept, of_h)

    # --- norms ------------------------------------------------------------------------------------

    def norm(self, name: str, kept: Kept, keep: bool = True) -> Block:
        """A norm of an input that stays. It is computed in float32, of a copy that backward needs."""
        wider = self._take(2 * self.thin)
        self._briefly(2 * self.thin)
        normed = self._take(2 * self.thin)
        scaled = self._take(2 * self.thin)
        needed = {"wider": True, "normed": self._how.trains_all}
        for what, block in (("wider", wider), ("normed", normed)):
            if keep and needed[what]:
                kept[f"{name}.{what}"] = block
            else:
                self._drop(block)
        out = self._take(self.thin)
        self._drop(scaled)
        return out

    def norm_backward(self, name: str, kept: Kept, gradient: Block) -> None:
        """From the gradient of the output to that of the input, which is added to what is there."""
        size = 2 * self.thin
        wider = self._take(size)
        self._drop(gradient)
        by_scale = self._take(size)
        if self._how.trains_all:
            self._briefly(size)
        self._drop(wider)
        if (normed := kept.pop(f"{name}.normed", None)) is not None:
            self._drop(normed)
        direct = self._take(size)
        self._briefly(size)
        self._drop(by_scale)
        shared = self._take(size)
        self._briefly(size, size, size)
        self._drop(kept.pop(f"{name}.wider"), shared)
        out = self._take(self.thin)
        self._drop(direct, out)

    def _norm_after(self, name: str, kept: Kept) -> None:
        if self._model.gemma2:
            self.norm_backward(name, kept, self._take(self.thin))

    # --- projections ------------------------------------------------------------------------------

    def _project(self, name: str, kept: Kept, keep: bool) -> Block:
        how, (inputs, outputs) = self._how, self._projections[name]
        size = HALF * self._tokens * outputs
        weights = self._dequantized(inputs * outputs)
        out = self._take(size)
        self._drop(*weights)
        if not how.adapts(name):
            return out
        if how.dropout:  # what is left, and the mask
            for what, each in (("left", HALF), ("mask", 1)):
                block = self._take(each * self._tokens * inputs)
                kept.update({f"{name}.{what}": block}) if keep else self._drop(block)
        low = self._take(HALF * self._tokens * how.adapter_rank)
        of_adapter = self._instead(self._take(size), size)
        result = self._take(size)
        kept.update({f"{name}.low": low}) if keep else self._drop(low)
        self._drop(out, of_adapter)
        return result

    def _of_input(self, name: str, kept: Kept) -> Block:
        """The gradient of a projection's input, from that of its output, which stays; and its weights'."""
        how, (inputs, outputs) = self._how, self._projections[name]
        numbers, size = inputs * outputs, HALF * self._tokens * inputs
        if how.trains_all:
            self._own(self._take(HALF * numbers))
            return self._take(size)
        of_adapter = None
        if how.adapts(name):
            scaled = self._take(HALF * self._tokens * outputs)
            self._own(self._take(HALF * how.adapter_rank * outputs))
            low = self._take(HALF * self._tokens * how.adapter_rank)
            self._drop(scaled, kept.pop(f"{name}.low"))
            self._own(self._take(HALF * how.adapter_rank * inputs))
            of_adapter = self._take(size)
            self._drop(low)
            if how.dropout:
                of_adapter = self._instead(of_adapter, size)
                self._drop(kept.pop(f"{name}.left"), kept.pop(f"{name}.mask"))
        weights = self._dequantized(numbers)
        of_input = self._take(size)
        self._drop(*weights)
        return of_input if of_adapter is None else self._sum(of_adapter, of_input)

    def _dequantized(self, numbers: int) -> list[Block]:
        """Weights in NF4 as they are multiplied. Two numbers share a byte; each half becomes an index of
        8 bytes, then a number."""
        if not self._how.quantized:
            return []
        temporaries = [self._take(each * numbers // 2) for each in (8, 8, 4 * HALF)]
        weights = self._take(HALF * numbers)
        self._drop(*temporaries)
        return [weights]

    # --- attention --------------------------------------------------------------------------------

    def _rotated(self, block: Block, size: int) -> Block:
        """Queries or keys with their positions, computed in float32."""
        wider = self._take(2 * size)
        self._briefly(size, size, size)
        joined = self._take(2 * size)
        out = self._take(size)
        self._drop(wider, joined, block)
        return out

    def _rotate_backward(self, size: int) -> None:
        self._briefly(2 * size, 2 * size, 2 * size)

    def _attend(self, kept: Kept, keep: bool) -> Block:
        """What attention gives. Flash attention writes no scores."""
        if not self._scores:
            return self._take(self._wide)

        def done(name: str, block: Block) -> None:
            kept.update({name: block}) if keep else self._drop(block)

        size = self._scores
        masks = [self._take(SINGLE * self._length**2) for _ in range(3)]
        q, k = self._take(self._wide), self._take(self._wide)
        scores = self._take(size)
        done("copied q", q)
        done("copied k", k)
        capped = self._instead(self._instead(scores, size), size)
        scaled = self._take(size)
        done("capped", capped)
        masked = self._take(2 * size)
        self._drop(scaled)
        wider = self._take(2 * size)
        shares = self._take(size)
        done("wider shares", wider)
        self._drop(masked)
        v, out = self._take(self._wide), self._take(self._wide)
        done("copied v", v)
        done("shares", shares)
        out = self._instead(out, self._wide)
        self._drop(*masks)
        return out

    def _attend_backward(self, kept: Kept) -> None:
        if not self._scores:
            self._briefly(2 * self._wide)  # the gradient of queries is added up in float32
            return
        size = self._scores
        of_shares = self._take(size)
        self._drop(kept.pop("shares"), kept.pop("copied v"))
        wider = self._instead(of_shares, 2 * size)
        product = self._take(2 * size)
        of_masked = self._instead(wider, 2 * size)
        self._drop(product)
        self._drop(kept.pop("wider shares"))
        scaled = self._instead(self._instead(of_masked, size), size)
        of_capped = self._instead(scaled, size)
        self._drop(kept.pop("capped"))
        self._drop(self._instead(of_capped, size), kept.pop("copied q"), kept.pop("copied k"))

    # --- blocks -----------------------------------------------------------------------------------

    def _instead(self, block: Block, size: int, other: Block | None = None) -> Block:
        """A block that takes the place of another."""
        other = self._take(size) if other is None else other
        self._drop(block)
        return other

    def _sum(self, one: Block, other: Block) -> Block:
        """The sum of two gradients of a layer's width."""
        both = self._take(self.thin)
        self._drop(one, other)
        return both
