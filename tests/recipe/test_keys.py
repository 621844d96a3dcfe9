"""The table of keys: whatever the code asks a config for has a row, and rows name kinds that there are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torchtune_adaptive
from torchtune_adaptive.core import knobs
from torchtune_adaptive.recipe.settings.adaptive import BLOCK, block_keys, top_level_keys
from torchtune_adaptive.recipe.settings.keys import KEYS, KEYS_OF_BLOCKS
from torchtune_adaptive.recipe.settings.kind_table import KINDS

PACKAGE = Path(torchtune_adaptive.__file__).parent
NO_KEYS = {"get", "items", "keys", "pop", "copy", "_component_"}
"""What a config, or the block of a component, has besides."""


def keys_that_are_read(tree: ast.Module) -> Iterator[str]:
    """The keys for which a variable named ``cfg`` is asked: ``cfg.get("a")``, ``cfg["a"]``, ``cfg.a``."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=asked, attr="get"), args=[ast.Constant(value=str(key)), *_]
            ) if _is_config(asked):
                yield key
            case ast.Subscript(value=asked, slice=ast.Constant(value=str(key))) if _is_config(
                asked
            ):
                yield key
            case ast.Attribute(value=asked, attr=key) if _is_config(asked):
                yield key


def _is_config(node: ast.expr) -> bool:
    match node:
        case ast.Name(id="cfg") | ast.Attribute(attr="cfg" | "_cfg"):
            return True
    return False


def test_every_key_that_is_read_has_a_row() -> None:
    known = KEYS.keys() | top_level_keys() | {BLOCK} | NO_KEYS
    read = {
        key: file.name
        for file in sorted(PACKAGE.rglob("recipe/**/*.py")) + sorted(PACKAGE.rglob("cli/*.py"))
        for key in keys_that_are_read(ast.parse(file.read_text()))
    }
    assert len(read) > 40  # or nothing was found to look at
    assert {key: file for key, file in read.items() if key not in known} == {}


def test_every_knob_has_a_row() -> None:
    for key in (getattr(knobs, name) for name in dir(knobs) if name.isupper()):
        block, _, name = key.partition(".")
        assert key == knobs.CHUNKED or block in KEYS or name in block_keys(), key


def test_rows_name_kinds_that_there_are_and_every_kind_has_keys() -> None:
    for key, row in KEYS.items():
        assert row.kinds <= KINDS.keys(), key
        assert row.needed | row.given <= row.kinds, key
    for kind in KINDS.values():
        for frozen in kind.frozen:
            for block in (frozen.model, frozen.checkpointer):
                assert kind.name in KEYS[block].needed, (kind.name, block)
    assert KEYS_OF_BLOCKS.keys() <= KEYS.keys()
    assert not KEYS.keys() & (top_level_keys() | block_keys())
