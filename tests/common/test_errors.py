"""The tree of errors, as its module draws it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torchtune_adaptive
from torchtune_adaptive.common import errors

FILES = sorted(Path(torchtune_adaptive.__file__).parent.rglob("*.py"))


def classes_and_bases() -> Iterator[tuple[str, set[str]]]:
    """Every class of the package, read from its text: what is imported depends on what has run."""
    for file in [Path(errors.__file__), *FILES]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def drawn(name: str, classes: dict[str, set[str]], depth: int = 1) -> Iterator[str]:
    yield "    " * depth + name
    for each, bases in classes.items():
        if name in bases:
            yield from drawn(each, classes, depth + 1)


def test_the_tree_of_errors_is_as_it_is_drawn() -> None:
    classes = dict(classes_and_bases())
    assert errors.__doc__ is not None
    tree = "\n".join([*drawn("AdaptiveBatchingError", classes), *drawn("Stopped", classes)])
    assert f"\n\n{tree}\n\n" in errors.__doc__
