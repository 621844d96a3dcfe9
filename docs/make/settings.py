"""The tables of ``docs/settings.md``, made from the fields of ``AdaptiveSettings`` and their docstrings.

python docs/make/settings.py
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields

from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings, block_keys, top_level_keys


def tables() -> tuple[str, str]:
    """The tables of the keys at top level and in the block, as Markdown."""
    return _table(top_level_keys()), _table(block_keys())


def _table(keys: frozenset[str]) -> str:
    docs = _docstrings()
    rows = [
        f"| `{f.name}` | `{'null' if f.default is None else f.default}` | {_markdown(docs[f.name])} |"
        for f in fields(AdaptiveSettings)
        if f.name in keys
    ]
    return "\n".join(["| key | default | |", "|---|---|---|", *rows, ""])


def _docstrings() -> dict[str, str]:
    """The text below each field; Python keeps it in the source only."""
    (tree,) = ast.parse(inspect.getsource(AdaptiveSettings)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            found[statement.target.id] = str(below.value.value)
    return found


def _markdown(text: str) -> str:
    line = " ".join(text.split()).replace("``", "`").replace("|", r"\|")
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", line)


if __name__ == "__main__":
    print("\n".join(tables()))
