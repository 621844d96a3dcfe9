"""``docs/api.md``, made from the docstrings of the library interface.

python docs/make/api.py > docs/api.md
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import is_dataclass
from typing import Any

import torchtune_adaptive

_HEAD = """# The library interface

Made from the docstrings by `python docs/make/api.py`. Everything here can be imported
from `torchtune_adaptive`. [The library](library.md) shows it at work.
"""

_ORDER = (
    "AdaptiveStep",
    "find_batch_size",
    "BatchSize",
    "steps_of",
    "Outcome",
    "plan_batch_size",
    "Plan",
    "Speed",
    "TransformersStep",
)
"""The names that come first; the rest follows in alphabetical order."""
_ONLY_MADE = ("Machine",)
"""Names of what is only passed on, whose methods are for those who are given it."""


def page() -> str:
    """The page, as Markdown."""
    others = sorted(set(torchtune_adaptive.__all__) - set(_ORDER))
    return "\n".join([_HEAD, *(_entry(name) for name in (*_ORDER, *others))])


def _entry(name: str) -> str:
    public = getattr(torchtune_adaptive, name)
    parts = [f"## `{name}`\n", _text(public)]
    if inspect.isfunction(public) or (_is_constructed(public) and not is_dataclass(public)):
        parts.insert(1, _signature(name, public))
    if inspect.isclass(public):
        parts += [f"- `{field}`: {text}" for field, text in _fields(public)]
        if name not in _ONLY_MADE:
            parts += [_method(name, method) for method in _methods(public)]
    return "\n".join(parts) + "\n"


def _is_constructed(public: Any) -> bool:
    return inspect.isclass(public) and "__init__" in vars(public)


def _method(owner: str, method: Any) -> str:
    name = "step" if method.__name__ == "__call__" else f"step.{method.__name__}"
    if owner != "AdaptiveStep":
        name = f"{owner}.{method.__name__}"
    return f"\n### `{name}`\n\n{_signature(name, method)}\n{_text(method)}"


def _methods(public: type) -> list[Any]:
    return [
        value
        for name, value in vars(public).items()
        if inspect.isfunction(value) and (name == "__call__" or name[0] != "_") and value.__doc__
    ]


def _signature(name: str, public: Any) -> str:
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(public).parameters.values()
        if parameter.name != "self"
    ]
    return f"    {name}{inspect.Signature(bare)}\n"


def _fields(public: type) -> list[tuple[str, str]]:
    """The text below each field or attribute; Python keeps it in the source only."""
    (tree,) = ast.parse(inspect.getsource(public)).body
    assert isinstance(tree, ast.ClassDef)
    return [
        (statement.target.id, " ".join(str(below.value.value).split()).replace("``", "`"))
        for statement, below in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    ]


def _text(public: Any) -> str:
    """A docstring as Markdown: arguments and errors become lists."""
    text = (inspect.getdoc(public) or "").replace("``", "`")
    about, *sections = re.split(r"(?m)^(?=(?:Args|Raises|Returns):$)", text)
    for section in sections:
        section = re.sub(r"\n {8,}", " ", section)  # an entry that goes on
        section = re.sub(r"(?m)^ {4}(\w+): ", r"- `\1`: ", section)
        about += section.replace(":\n", ":\n\n", 1)
    return about + "\n"


if __name__ == "__main__":
    print(page(), end="")
