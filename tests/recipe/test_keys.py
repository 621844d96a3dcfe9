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
from torchtune_adaptive.recipe.settings.rules import COMPONENT

PACKAGE = Path(torchtune_adaptive.__file__).parent
NO_KEYS = {"get", "items", "keys", "pop", "copy", "_component_"}
"""What a config, or the block of a component, has besides."""

BLOCKS = {key for key, row in KEYS.items() if row.rule is COMPONENT} | {"dataset", "dataset_val"}
"""What torchtune's components are made of, which any module may read."""

RAW = {
    # It is the config that is saved with a run, and shows what was found.
    "recipe/record.py": {"batch_size", "gradient_accumulation_steps", "output_dir"},
    "recipe/train/growth.py": {"batch_increase_function"},  # a component of ours
    "cli/command_line.py": {"output_dir"},  # before it is known whether there is a run to ask for
    "cli/run_command.py": {"device"},  # of any recipe, of which torchtune's own are no kind of ours
}
"""The other keys that are read from a config outside of ``settings``, by module. Use ``Asked`` instead."""


def read_from(tree: ast.Module) -> Iterator[str]:
    """The keys that a config is asked for: ``cfg.get("a")``, ``cfg["a"]``, ``cfg.a``."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=cfg, attr="get"), args=[ast.Constant(value=str(key)), *_]
            ) if _is("cfg", cfg):
                yield key
            case ast.Subscript(value=cfg, slice=ast.Constant(value=str(key))) if _is("cfg", cfg):
                yield key
            case ast.Attribute(value=cfg, attr=key) if _is("cfg", cfg):
                yield key


def _is(name: str, node: ast.expr) -> bool:
    match node:
        case ast.Name(id=found) | ast.Attribute(attr=found):
            return found.removeprefix("_") == name
    return False


def modules() -> dict[str, ast.Module]:
    files = [*PACKAGE.rglob("recipe/**/*.py"), *PACKAGE.rglob("cli/*.py")]
    return {str(each.relative_to(PACKAGE)): ast.parse(each.read_text()) for each in files}


def test_only_settings_read_a_config_but_for_components() -> None:
    read = {
        name: set(read_from(tree)) - NO_KEYS - BLOCKS
        for name, tree in modules().items()
        if not name.startswith("recipe/settings/")
    }
    assert {name: keys for name, keys in read.items() if keys} == RAW


def test_every_key_that_is_read_has_a_row() -> None:
    known = KEYS.keys() | top_level_keys() | {BLOCK} | NO_KEYS
    read: dict[str, str] = {}
    for name, tree in modules().items():
        read |= {key: name for key in read_from(tree) if key not in known}
        for node in ast.walk(tree):
            match node:
                case ast.Subscript(value=asked, slice=ast.Constant(value=str(key))):
                    if _is("asked", asked) and key not in KEYS:
                        read[key] = name
    assert read == {}


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
