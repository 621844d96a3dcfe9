"""Which layers of a model are alike, and what is left of them."""

from __future__ import annotations

import pytest
from torch import nn

from torchtune_adaptive.planner.trace.alike_layers import Shortening


class Layer(nn.Module):
    def __init__(self, place: int, window: int | None = None, width: int = 4) -> None:
        super().__init__()
        self.place, self.window = place, window
        self.product = nn.Linear(width, width, device="meta")


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, device="meta")
        self.layers = nn.ModuleList(layers)


def left(model: Model) -> list[int]:
    return [layer.place for layer in model.layers]


def uniform(number: int) -> Model:
    return Model(*(Layer(n) for n in range(number)))


def test_so_many_layers_are_kept() -> None:
    shorten, model = Shortening(4), uniform(32)
    shorten(model)
    assert left(model) == [0, 1, 2, 3]
    assert (shorten.repetitions, shorten.removed) == (32, 28)


def test_nothing_is_removed_from_a_model_with_fewer() -> None:
    shorten, model = Shortening(4), uniform(3)
    shorten(model)
    assert left(model) == [0, 1, 2] and shorten.removed == 0


def test_nothing_is_removed_where_that_is_not_worth_it() -> None:
    for least, layers in ((28, 4), (29, 32)):
        shorten, model = Shortening(4, least=least), uniform(32)
        shorten(model)
        assert (len(model.layers), shorten.removed) == (layers, 32 - layers)


def test_layers_of_several_kinds_are_kept_in_whole_patterns() -> None:
    """Full attention in every sixth layer, and two more at the end."""
    model = Model(*(Layer(n, None if n % 6 == 5 else 512) for n in range(62)))
    shorten = Shortening(4)
    shorten(model)
    assert [layer.window for layer in model.layers] == [*[512] * 5, None] * 4 + [512, 512]
    assert (shorten.repetitions, shorten.removed) == (10, 6)


def test_other_layers_at_the_ends_stay() -> None:
    wide = [Layer(0, width=8), *(Layer(n) for n in range(1, 20)), Layer(20, width=8)]
    model = Model(*wide)
    Shortening(4)(model)
    assert [layer.product.in_features for layer in model.layers] == [8, 4, 4, 4, 4, 8]


def test_what_repeats_besides_layers_goes_on_evenly() -> None:
    model = uniform(31)
    Shortening(4, 3)(model)
    assert len(model.layers) == 31 - 3 * 6


def test_models_that_are_as_deep_are_shortened_together() -> None:
    shorten = Shortening(4)
    policy, reference, teacher = uniform(16), uniform(16), uniform(32)
    for model in (policy, reference, teacher):
        shorten(model)
    assert [len(model.layers) for model in (policy, reference, teacher)] == [4, 4, 32]


@pytest.mark.parametrize("changed", [{"window": 7}, {"width": 6}])
def test_layers_that_all_differ_are_kept(changed: dict[str, int]) -> None:
    key, factor = next(iter(changed.items()))
    model = Model(*(Layer(n, **{key: factor + n * n}) for n in range(20)))
    shorten = Shortening(4)
    shorten(model)
    assert len(model.layers) == 20 and shorten.removed == 0


def test_trained_layers_are_not_like_frozen_ones() -> None:
    model = uniform(20)
    for layer in model.layers[10:]:
        layer.requires_grad_(False)
    Shortening(4)(model)
    assert left(model) == [0, 1, 2, 3, *range(10, 20)]
