"""Sequences with repetitions, extended: by those that any number of layers would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from torchtune_adaptive.planner.repetition import Element, NotPeriodic, extended


class Step:
    """Writes down what a step of a model does: blocks are known by name."""

    def __init__(self) -> None:
        self.elements: list[Element] = []
        self.places: dict[object, int] = {}

    def take(self, name: object, kind: str, *sizes: float, number: int = 0) -> None:
        self.places[name] = len(self.elements)
        self.elements.append(Element(kind, sizes, None, number))

    def free(self, name: object) -> None:
        self.elements.append(Element("free", (), self.places.pop(name)))


def training(layers: int, held: int = 0) -> list[Element]:
    """Forward and backward passes and an update. Activations are ``held`` until so many other layers have
    run."""
    step = Step()
    step.take("tokens", "input", 8)
    for n in range(layers):
        step.take((n, "gathered"), "gather", 100)
        step.take((n, "in"), "norm", 10)
        step.take((n, "inner"), "product", 40)
        step.free((n, "gathered"))
        if n >= held:
            step.free((n - held, "inner"))
    for n in range(max(0, layers - held), layers):
        step.free((n, "inner"))
    step.take("norms", "stack", 4 * layers, 3)
    step.free("norms")
    for n in reversed(range(layers)):
        if n:  # the next one is gathered early
            step.take((n - 1, "gathered"), "gather", 100)
        step.take((n, "again"), "product", 40, number=n + 1)
        step.free((n, "in"))
        step.free((n, "again"))
        if n + 1 < layers:
            step.free((n, "gathered"))
    for n in range(layers):  # lists, as optimizers have them
        for size in (16, 16, 4):
            step.take((n, "update", len(step.elements)), "update", size)
    for name in [name for name in step.places if isinstance(name, tuple) and "update" in name]:
        step.free(name)
    step.free("tokens")
    return step.elements


@pytest.mark.parametrize("held", [0, 1, 2])
@pytest.mark.parametrize("layers", [8, 9, 12, 61])
def test_two_shallow_models_tell_of_a_deep_one(layers: int, held: int) -> None:
    few = 5 + held
    found = extended(training(few, held), training(few + 1, held), layers - few)
    assert found == training(layers, held)


def test_layers_of_two_kinds_repeat_together() -> None:
    def alternating(pairs: int) -> list[Element]:
        step = Step()
        for n in range(2 * pairs):
            step.take(n, "full" if n % 2 else "sliding", 10 + n % 2)
        for n in reversed(range(2 * pairs)):
            step.free(n)
        return step.elements

    assert extended(alternating(4), alternating(5), 20) == alternating(24)


def drifting(layers: int) -> list[Element]:
    """What is freed comes one place nearer in each layer: that ends somewhere."""
    step = Step()
    for n in range(layers):
        for part in range(30):
            step.take((n, part), f"part {part}", 1)
        if n:
            step.free((n - 1, n))
    return step.elements


def without_a_rule(layers: int) -> list[Element]:
    """Each layer frees what was allocated by the one whose number is a half of its own."""
    step = Step()
    for n in range(layers):
        step.take(n, "take", 1)
        step.elements.append(Element("free", (), step.places[n // 2]))
    return step.elements


def of_other_kinds(layers: int) -> list[Element]:
    return [Element(f"layer {n} of {layers}") for n in range(layers)]


def doubling(layers: int) -> list[Element]:
    return [Element("take", (2**n,)) for n in range(layers)]


@pytest.mark.parametrize("sequence", [drifting, without_a_rule, of_other_kinds, doubling])
def test_what_does_not_repeat_is_not_extended(
    sequence: Callable[[int], Sequence[Element]],
) -> None:
    with pytest.raises(NotPeriodic):
        extended(sequence(5), sequence(6), 10)
