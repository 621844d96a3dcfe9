"""The tree of errors, as its module draws it."""

from __future__ import annotations

from collections.abc import Iterator

from torchtune_adaptive.common import errors
from torchtune_adaptive.recipe.tracing import traces  # which has one of its own


def drawn(kind: type, depth: int = 1) -> Iterator[str]:
    yield "    " * depth + kind.__name__
    for each in kind.__subclasses__():
        if each.__module__.startswith("torchtune_adaptive."):
            yield from drawn(each, depth + 1)


def test_the_tree_of_errors_is_as_it_is_drawn() -> None:
    assert issubclass(traces.NotRemembered, errors.NoPrediction)
    assert errors.__doc__ is not None
    tree = "\n".join([*drawn(errors.AdaptiveBatchingError), *drawn(errors.Stopped)])
    assert f"\n\n{tree}\n\n" in errors.__doc__
