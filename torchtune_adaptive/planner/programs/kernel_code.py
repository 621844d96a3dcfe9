"""What the code of a Triton kernel says about its arguments."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

_WRITES = ("store", "atomic_")
"""Beginnings of the names of functions and methods that write, where a pointer says."""


@cache
def written(function: Any) -> frozenset[str]:
    """The parameters of a kernel that point to what it, or one that it calls, writes; all of them where its
    code does not say."""
    parameters = [*inspect.signature(function).parameters]
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return frozenset(parameters)
    found: set[str] = set()
    for call in ast.walk(code):
        if isinstance(call, ast.Call):
            found.update(_names(_pointers(call, function)))
    while True:  # what they are made of
        before = len(found)
        for node in ast.walk(code):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            value = getattr(node, "value", None) or getattr(node, "iter", None)
            if value and any(one and found.intersection(_names([one])) for one in targets):
                found.update(_names([value]))
        if len(found) == before:
            return frozenset(found.intersection(parameters) or parameters)


def _pointers(call: ast.Call, function: Any) -> Iterator[ast.expr]:
    """The arguments of a call that point to what it writes."""
    named = {one.arg: one.value for one in call.keywords}
    if isinstance(call.func, ast.Attribute) and call.func.attr.startswith(_WRITES):
        yield from (call.func.value, *call.args[:1], *named.values())
    elif isinstance(call.func, ast.Name):
        kernel = getattr(function.__globals__.get(call.func.id), "fn", None)
        if inspect.isfunction(kernel) and kernel is not function:
            given = dict(zip(inspect.signature(kernel).parameters, call.args, strict=False)) | named
            yield from (given[name] for name in written(kernel) & given.keys())


def _names(values: Iterable[ast.AST]) -> Iterator[str]:
    """The names in expressions, without those of what is loaded for them."""
    for value in values:
        if isinstance(value, ast.Name):
            yield value.id
        elif not (isinstance(value, ast.Call) and getattr(value.func, "attr", "") == "load"):
            yield from _names(ast.iter_child_nodes(value))
