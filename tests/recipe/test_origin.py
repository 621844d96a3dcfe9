"""What a report says of how a run came about: the command, the config, the model and its data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.recipe.origin import Origin, data_in_words, model_in_words, versions
from torchtune_adaptive.recipe.registry import find_config, load_config, with_overrides

RECIPE = "adaptive_full_finetune_distributed"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def started(*overrides: str, config: str = "tiny/full", program: str = RECIPE) -> Origin:
    """As by ``tune run``, which gives a recipe its own file and that of the config."""
    arguments = [f"/anywhere/{program}.py", "--config", str(find_config(config)), *overrides]
    return Origin.of(arguments, RECIPE)


def test_the_command_can_be_pasted() -> None:
    command = started("output_dir=/tmp/my run", "epochs=2").command
    assert command == f"tune run {RECIPE} --config tiny/full 'output_dir=/tmp/my run' epochs=2"
    assert shlex.split(command)[-2:] == ["output_dir=/tmp/my run", "epochs=2"]


@pytest.mark.parametrize(
    ("size", "options"), [(2, "--nproc_per_node 2"), (8, "--nnodes 4 --nproc_per_node 2")]
)
def test_the_command_starts_as_many_ranks(
    size: int, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    assert started().command == f"tune run {options} {RECIPE} --config tiny/full"


@pytest.mark.parametrize("name", ["tiny/full", "llama3_1/8B_full", "llama3_2/1B_adaptive_full"])
def test_configs_are_named_whoever_they_are_from(name: str) -> None:
    assert started(config=name).config_name == name


def test_a_file_of_ones_own_keeps_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("epochs: 1\n")
    found = started(config=str(path), program="mine")
    assert found.command == f"tune run /anywhere/mine.py --config {path}"
    path.unlink()
    gone = Origin.of(["mine.py", "--config", str(path)], RECIPE)
    assert gone.differences(OmegaConf.create({})) is None


@pytest.mark.parametrize("arguments", [["pytest"], ["pytest", "-q"], ["x", "--config"]])
def test_a_recipe_that_is_called_has_no_command(arguments: list[str]) -> None:
    found = Origin.of(arguments, RECIPE)
    assert found.command == "" and found.differences(OmegaConf.create({})) is None


def test_a_config_is_shown_as_what_is_not_as_written() -> None:
    cfg: Any = with_overrides(
        load_config("tiny/full"),
        ["output_dir=/tmp/x", "optimizer.lr=1e-4", "~clip_grad_norm", "gamma=None"],
    )
    cfg.search_result = {"batch_size": 8}
    assert started().differences(cfg) == [
        ("output_dir", "/tmp/torchtune_adaptive/tiny_full", "/tmp/x"),
        ("optimizer.lr", "0.003", "0.0001"),
        ("clip_grad_norm", "1.0", "-"),
        ("gamma", "-", "null"),
    ], "not what refers to another key, and not what a search has found"
    assert started().differences(load_config("tiny/full")) == []


def test_model_and_data_in_words() -> None:
    table = {"_component_": "my.table", "source": "json", "data_files": "a.json", "split": "train"}
    cfg = OmegaConf.create(
        {"model": {"_component_": "my.llama"}, "dataset": [table, {"_component_": "my.other"}]}
    )
    assert model_in_words(cfg, 1_000, 1_000) == "my.llama: 1,000 parameters"
    assert model_in_words(cfg, 1_000, 10) == "my.llama: 1,000 parameters, 10 of them trained"
    assert data_in_words(cfg, 640, "row") == (
        "my.table (source json, data_files a.json, split train); my.other: 640 rows"
    )
    both = {"policy_model": "my.policy", "reward_and_value_model": "my.value"}
    ppo = OmegaConf.create({key: {"_component_": name} for key, name in both.items()})
    assert model_in_words(ppo, 1, 1) == "my.policy and my.value: 1 parameter"


def test_versions_are_those_that_matter() -> None:
    for name in ("torch ", "torchtune ", "torchtune-adaptive ", "Python "):
        assert name in versions()
