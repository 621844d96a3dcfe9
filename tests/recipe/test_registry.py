"""Names of recipes and configs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torchtune import config
from torchtune._recipe_registry import get_all_recipes

from tests.helpers.configs import config as load
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.recipe.registry import (
    CONFIGS,
    RECIPES,
    component,
    find_config,
    load_config,
    our_configs,
    register,
    torchtune_configs,
)
from torchtune_adaptive.recipe.settings.kind_table import kind_of


def test_a_name_a_path_and_torchtunes_names_are_found(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("a: 1")
    assert find_config(str(mine)) == mine
    assert find_config("tiny/full") == CONFIGS / "tiny" / "full.yaml"
    assert find_config("llama3_2/1B_full").name == "1B_full.yaml"
    assert all(path.is_file() for path in torchtune_configs().values())


def test_a_name_that_exists_nowhere_says_which_do() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean llama3_2/1B_adaptive_full or [^;]*\?$"):
        find_config("llama3_2/1B_adaptive_ful")
    with pytest.raises(ConfigError) as raised:
        find_config("zzz")
    with pytest.raises(ConfigError, match=r"Did you mean llama3_1/8B_qlora_single_device or"):
        find_config("llama3_1/8B_qlora")
    message = str(raised.value)
    assert all(name in message for name in our_configs())
    assert "tune ls" in message


@pytest.mark.parametrize("content", [b"a: [", b"- a", b"a: 1\na: 2", b"\xff", b"a: ${b"])
def test_a_file_that_is_no_config_is_an_error_of_one_line(content: bytes, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_config(str(mine))
    assert str(mine) in str(raised.value) and "\n" not in str(raised.value)


def test_a_function_of_the_working_directory_comes_after_those_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def grow(): return 3")
    (tmp_path / "torchtune.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert component("only_here.grow")() == 3
    assert component("torchtune.config.parse") is config.parse
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert component("only_here.grow")() == 3


def test_registering_twice_is_registering_once() -> None:
    register()
    register()
    ours = {
        recipe.name: recipe for recipe in get_all_recipes() if recipe.name.startswith("adaptive")
    }
    assert (
        len(ours)
        == len([r for r in get_all_recipes() if r.name.startswith("adaptive")])
        == len(RECIPES)
    )
    for name, recipe in ours.items():
        assert recipe.supports_distributed and Path(recipe.file_path).stem == name
    by_recipe = [config.name for recipe in ours.values() for config in recipe.configs]
    assert sorted(by_recipe) == our_configs(), "each config belongs to one recipe"
    for name, recipe in ours.items():
        assert all(kind_of(load_config(config.name)).recipe == name for config in recipe.configs)


@pytest.mark.parametrize("name", our_configs())
def test_torchtune_finds_our_configs_well_formed(name: str) -> None:
    config.validate(load(name))
