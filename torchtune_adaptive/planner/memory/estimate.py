"""An estimate of a step's peak by arithmetic, in a fraction of a second and without torch.

The large tensors of a step are written down by hand, in the order in which torchtune's recipes and FSDP
allocate and free them, with sizes that follow from the shape of the model. They are replayed as the events of
a traced step are (see ``peak``), so what the allocator keeps for each stream is counted too. What only a
trace can know is left out: compilers, masks, images, and whatever is small. How far estimates are from traces
is measured (``docs/results/estimate.md``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torchtune_adaptive.planner.memory.decoder import HALF, SINGLE, Decoder, Finetuning, UnitWeights
from torchtune_adaptive.planner.memory.peak import DeviceLimits, Peak, StartUp, peak
from torchtune_adaptive.planner.memory.recorded_step import Kept as KeptBlock
from torchtune_adaptive.planner.memory.recorded_step import MemoryEvent, RecordedStep
from torchtune_adaptive.planner.memory.written_layer import (
    MAIN,
    Block,
    Kept,
    WrittenEvents,
    WrittenLayer,
)

ERROR = 0.05
"""The share of the traced peak within which nine of ten estimates are, for torchtune's own configs
(``docs/results/estimate.md``)."""
_GATHERING, _REDUCING, _OFFLOADING = 1, 2, 3
"""Streams. What was freed on one is not used again on another."""
_TABLE, _HEAD = "tok_embeddings", "output"


def estimate(
    decoder: Decoder,
    how: Finetuning,
    rows: int,
    length: int,
    device: DeviceLimits,
    searches: bool = True,
) -> Peak:
    """The peak of a step of so many rows in a micro-batch; ``searches`` says whether the run searches before
    it trains."""
    written = _WrittenStep(decoder, how, rows, length).written(searches)
    return peak(*written, rows, length, device)


class _WrittenStep:
    """A rank's step, written down."""

    def __init__(self, decoder: Decoder, how: Finetuning, rows: int, length: int) -> None:
        self._model, self._how, self._tokens = decoder, how, rows * length
        self._events = events = WrittenEvents()
        self._take, self._drop = events.take, events.drop
        self._layer = WrittenLayer(events, decoder, how, rows, length, self._own)
        self._head = _TABLE if decoder.tied else _HEAD
        self._units = self._gathered_together()
        self._is_first = True
        """Whether it is the first micro-batch of the step."""
        self._whole: dict[str, list[Block]] = defaultdict(list)
        """Gradients that are not reduced yet, by unit."""
        self._waiting: list[Block] = []
        """Gradients that wait for the optimizer."""
        self._used: list[tuple[int, float]] = []
        """Where the optimizer is given gradients: the events before, and the numbers that it trains there."""
        self._gathering: list[Block] = []
        """The buffer of the last unit that was gathered, or of the next one."""
        self._reducing: list[Block] = []
        """The buffer of the last unit whose gradients were reduced."""
        self._is_ahead = False
        """Whether the next unit is in that buffer."""
        self._is_backward = False
        """Whether buffers are freed once weights are copied from them; in forward, after the next copy."""

    def written(self, searches: bool) -> tuple[StartUp, RecordedStep]:
        """The events before the step, and its own."""
        how, held = self._how, 0 if self._how.on_host else 1 / self._how.ranks
        every = [self._units["layer"]] * self._model.layers + [self._units["tables"]]
        self._take(self._model.positions * self._model.longest * self._model.head_dim)
        for nbytes in (nbytes for weights in every for nbytes in weights.sizes):
            self._take(held * nbytes)
        set_up = self._events.cut()
        for weights in every:
            self._take(held * how.state * weights.trained)
        first_step = self._events.cut()
        for number in range(how.micro_batches):
            self._is_first = number == 0
            self._micro_batch()
        if not how.in_backward:
            self._used += [(len(self._events.events), held * one.trained) for one in every]
        self._events.briefly(held * how.copied * sum(weights.trained for weights in every))
        self._drop(*self._waiting)
        kept = [
            KeptBlock(place, MemoryEvent(0, int(how.state / 2 * numbers), MAIN))
            for place, numbers in self._used
            for _ in range(2)
        ]
        return StartUp(set_up, first_step, None if searches else kept), self._events.cut()

    def _micro_batch(self) -> None:
        how, layer, numbers = self._how, self._layer, range(1, self._model.layers + 1)
        root = self._gather("root")
        table = self._gather(_TABLE)
        x = self._take(layer.thin)
        self._drop(*table)
        kept, weights = [], []
        for number in numbers:
            gathered = self._gather("layer")
            again = how.checkpointed(number)
            keeps, out = layer.forward(keep=not again)
            if not again:
                self._drop(x)
            if how.offloads:
                self._drop(*keeps.values(), *[x] * again)
            kept.append((keeps, [x] * again))
            x = out
            if how.reshards:
                self._drop(*gathered)
            else:
                weights += gathered
        of_table, root, gradient = self._loss(x, root)
        for number in reversed(numbers):
            gathered = self._gather("layer", number > 1) if how.reshards else []
            keeps, inputs = kept.pop()
            if how.offloads:
                keeps = dict(zip(keeps, self._back(keeps.values()), strict=True))
                inputs = self._back(inputs)
            if inputs:
                keeps, out = layer.forward(keep=True)
                self._drop(out)
            layer.backward(keeps)
            self._drop(*inputs, *gathered)
            self._reduce("layer")
        self._drop(*weights)
        table = self._gather(_TABLE)
        if how.trains_all:
            rows = self._take(HALF * self._model.table)
            self._drop(*of_table)  # of the same weights, as the last projection
            self._own(rows, _TABLE)
        self._drop(gradient, *table, *root)
        self._reduce(_TABLE)
        self._reduce("root")
        self._drop(*self._reducing)
        self._reducing, self._is_backward = [], False

    def _back(self, blocks: Iterable[Block]) -> list[Block]:
        """Blocks that return from the host."""
        return [self._take(self._events.sizes[block], _OFFLOADING) for block in blocks]

    def _loss(self, x: Block, root: list[Block]) -> tuple[list[Block], list[Block], Block]:
        """From the last layer's output to its gradient; and the gradient of weights that have another, and
        the root's weights, gathered again."""
        how, layer, head, kept = self._how, self._layer, self._head, Kept()
        normed = layer.norm("norm", kept)
        wide = self._tokens * self._model.vocabulary // how.chunks
        logits = []
        for _ in range(how.chunks):
            weights = self._gather(head)
            logits.append(self._take(HALF * wide))
            self._drop(*weights)
        self._drop(x)
        if how.reshards:
            self._drop(*root)
        self._drop(*self._gathering)  # the end of forward
        self._gathering, self._is_backward = [], True
        probabilities = []
        for _ in range(how.chunks):
            wider = self._take(SINGLE * wide)
            probabilities.append(self._take(SINGLE * wide))
            self._drop(wider)
        self._drop(*logits)
        gradients = []
        while probabilities:
            of_picked, of_wider = self._take(SINGLE * wide), self._take(SINGLE * wide)
            self._drop(of_picked, probabilities.pop())
            gradients.append(self._take(HALF * wide))
            self._drop(of_wider)
        if how.reshards:
            root = self._gather("root")
        of_weights: list[Block] = []
        for number, each in enumerate(gradients):
            weights = self._gather(head)
            if how.trains_all:
                of_weights.append(self._take(HALF * self._model.table))
            if number == 1 and of_weights:  # the sum of two is new, to which the others are added
                of_weights.append(self._take(HALF * self._model.table))
            self._drop(*of_weights[:-1] if number < 2 else of_weights[1:])
            of_weights = of_weights[-1:] if number < 2 else of_weights[:1]
            self._drop(each, *weights)
        if not self._model.tied:
            for block in of_weights:
                self._own(block, head)
            of_weights = []
            self._reduce(head)
        of_x = self._take(layer.thin)
        self._drop(normed)
        gradient = self._take(layer.thin)
        layer.norm_backward("norm", kept, of_x)
        return of_weights, root, gradient

    # --- what FSDP gathers and reduces ------------------------------------------------------------

    def _gathered_together(self) -> dict[str, UnitWeights]:
        model, how = self._model, self._how
        layer = (how.weights(name, *shape) for name, shape in model.projections.items())
        shape = (model.embed, model.vocabulary)
        tables = {_TABLE: how.weights(_TABLE, *shape, in_layer=False)}
        if not model.tied:
            tables[_HEAD] = how.weights(_HEAD, *shape, in_layer=False)
        return {
            "layer": sum(layer, UnitWeights()),
            "tables": sum(tables.values(), UnitWeights()),
            "root": sum((tables[one] for one in tables.keys() - how.apart), UnitWeights()),
            **{one: tables[one] for one in tables.keys() & how.apart},
        }

    def _gather(self, unit: str, and_next: bool = False) -> list[Block]:
        """The weights of a unit, if there is such a unit; ``and_next`` gathers the next layer meanwhile."""
        if not self._how.sharded or unit not in self._units:
            return []
        weights = self._units[unit].sizes
        before = self._gathering
        if not self._is_ahead:
            self._gathering = [self._take(sum(weights), _GATHERING)]
        gathered = [self._take(nbytes) for nbytes in weights]
        self._drop(*before)
        if self._is_ahead:
            self._gathering = []
        if self._is_backward:
            self._drop(*self._gathering)
            self._gathering = []
        self._is_ahead = and_next
        if and_next:
            self._gathering = [self._take(sum(weights), _GATHERING)]
        return gathered

    def _own(self, gradient: Block, unit: str = "layer") -> None:
        """Keep the gradient of weights as long as it is needed."""
        if self._how.sharded:
            self._whole[unit if unit in self._units else "root"].append(gradient)
        elif self._is_first and not self._how.in_backward:
            self._waiting.append(gradient)
        else:  # it is added to that of the first micro-batch, or used at once
            self._use(gradient)

    def _reduce(self, unit: str) -> None:
        """Reduce a unit's gradients, of which each rank keeps its part."""
        if not self._how.sharded or not (trained := self._units.get(unit, UnitWeights()).trained):
            return
        self._drop(*self._reducing)
        self._reducing = [self._take(HALF * trained)]
        self._drop(*self._whole.pop(unit, ()))
        part = self._take(HALF * trained / self._how.ranks, _REDUCING)
        if self._is_first and not (self._how.on_host or self._how.in_backward):
            self._waiting.append(part)
        else:
            self._use(part)

    def _use(self, gradient: Block) -> None:
        """Drop a gradient, once the optimizer has used it if that is in backward."""
        if self._how.in_backward:
            numbers = self._events.sizes[gradient] / HALF
            self._used.append((len(self._events.events), numbers))
        self._drop(gradient)
