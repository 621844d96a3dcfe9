"""Whole weights in files of which each rank writes some: the usual ones, and all of them or none."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch import nn
from torchtune import training
from torchtune.training.checkpointing import _checkpointer

from tests.helpers import tiny_vision
from tests.helpers.ranks import run_ranks, watch_ranks
from tests.helpers.recipes import in_files, quantised, run_ours, tiny_config
from tests.helpers.runs import RESUME, train
from tests.helpers.torchvision import use_torchvision
from torchtune_adaptive.common import durable
from torchtune_adaptive.recipe import private
from torchtune_adaptive.recipe.checkpoints.weight_files import deal

use_torchvision()  # here, because ranks import this module, too

SHARDED = {"adaptive_batching.sharded_checkpoints": True}


def names(layers: int) -> list[str]:
    """Those of a model's weights, as torchtune has them."""
    of_layer = ("attn.q_proj.weight", "attn.q_proj.lora_a.weight", "mlp.w1.weight")
    inside = [f"layers.{layer}.{each}" for layer in range(layers) for each in of_layer]
    return ["tok_embeddings.weight", *inside, "norm.scale", "output.weight"]


@pytest.mark.parametrize("layers", [1, 2, 7, 12])
@pytest.mark.parametrize("files", [1, 2, 3, 8, 40])
def test_layers_stay_whole_and_in_order(layers: int, files: int) -> None:
    file = deal(dict.fromkeys(names(layers), 100), files)
    assert list(file.values()).count(0) >= 3 and file["output.weight"] == 0
    of_layers = [file[f"layers.{layer}.attn.q_proj.weight"] for layer in range(layers)]
    assert of_layers == sorted(of_layers)
    for layer in range(layers):
        assert len({n for name, n in file.items() if name.startswith(f"layers.{layer}.")}) == 1
    assert set(file.values()) == set(range(max(file.values()) + 1)), "no file is empty"
    assert max(file.values()) < files


def test_files_are_about_equal() -> None:
    sizes = {name: 1000 if "layers" not in name else 100 for name in names(60)}
    file = deal(sizes, 7)
    of_files = [sum(sizes[name] for name, n in file.items() if n == each) for each in range(7)]
    assert max(of_files) - min(of_files) <= 600, of_files  # two layers


# --- torchtune converts layer by layer ---------------------------------------------------------------

HEADS = {"num_heads": 4, "num_kv_heads": 2}
SIZE = {"vocab_size": 32, "num_layers": 3, "embed_dim": 16, "max_seq_len": 8, **HEADS}


def model(kind: str) -> nn.Module:
    from torchtune.models import gemma, gemma2, llama2, llama3, mistral, phi3, qwen2

    more = {"intermediate_dim": 32}
    builders: dict[str, Any] = {
        "LLAMA2": llama2.llama2,
        "LLAMA3": llama3.llama3,
        "MISTRAL": mistral.mistral,
        "REWARD": partial(mistral.mistral_classifier, num_classes=1),
        "QWEN2": qwen2.qwen2,
        "PHI3_MINI": phi3.phi3,
        "GEMMA": partial(gemma.gemma, head_dim=4),
        "GEMMA2": partial(gemma2.gemma2, head_dim=4),
    }
    torch.manual_seed(0)
    built: nn.Module = builders[kind](**SIZE, **more)
    return built


def checkpointer(kind: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A checkpointer of a kind of model, and the weights of a tiny one."""
    given = folder / "given"
    given.mkdir()
    if kind == "LLAMA3_VISION":
        tiny_vision.make(given)
    else:
        facts = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
        (given / "config.json").write_text(json.dumps({**facts, "tie_word_embeddings": False}))
        (given / "model.safetensors").touch()
    files = [each.name for each in given.glob("*.safetensors")]
    built = training.FullModelHFCheckpointer(str(given), files, kind, str(folder / "out"))
    if kind == "LLAMA3_VISION":
        return built, built.load_checkpoint()[training.MODEL_KEY]
    return built, model(kind).state_dict()


KINDS = ["LLAMA2", "LLAMA3", "MISTRAL", "REWARD", "QWEN2", "PHI3_MINI", "GEMMA", "GEMMA2"]


@pytest.mark.parametrize("kind", [*KINDS, "LLAMA3_VISION"])
def test_files_of_layers_have_what_the_whole_has(kind: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given, weights = checkpointer(kind, tmp_path)

    def save(some: dict[str, torch.Tensor], into: Path) -> None:
        private.writing_one_file(given, into).save_checkpoint({training.MODEL_KEY: some}, epoch=0)

    save({**weights}, whole)
    file = deal({name: one.nbytes for name, one in weights.items()}, 3)
    for number in range(3):
        own = {name: one for name, one in weights.items() if file[name] == number}
        save(own, parts / str(number))
    [expected] = [load_file(path) for path in whole.rglob("*.safetensors")]
    found: dict[str, torch.Tensor] = {}
    for path in parts.rglob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == expected.keys() and len(list(parts.iterdir())) == 3
    assert all(torch.equal(found[name], one) for name, one in expected.items())


# --- runs ---------------------------------------------------------------------------------------------


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder as Hugging Face finds them: by the index."""
    content = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(content["weight_map"].values())}
    assert sum(len(each) for each in files.values()) == len(content["weight_map"])
    assert content["metadata"]["total_size"] == sum(
        one.nbytes for each in files.values() for one in each.values()
    )
    return {name: files[file][name] for name, file in content["weight_map"].items()}


def assert_same_content(whole: Path, parts: Path) -> None:
    """Except for the files that weights are in."""
    expected, found = weights_in(whole), weights_in(parts)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    written_elsewhere = ("model", durable.MANIFEST, "recipe_state")
    for path in whole.rglob("*"):
        other = parts / path.relative_to(whole)
        if path.is_dir() or path.name.startswith(written_elsewhere):
            continue
        if path.name == "adapter_model.pt":  # a zip file, which has the name of its folder in it
            one, another = torch.load(path), torch.load(other)
            assert one.keys() == another.keys()
            assert all(torch.equal(another[key], weight) for key, weight in one.items())
        else:
            assert path.read_bytes() == other.read_bytes(), path.name


RUNS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "full": ("full", 2, 3, {}),
    "as many files as there are layers": ("full", 3, 9, {}),
    "lora": ("lora", 2, 3, {}),
    "replicas": ("full", 4, 2, {"data_parallel_replicate_dim": 2}),
    "alone": ("full", 1, 3, {}),
    "quantised": ("lora", 2, 2, {}),
}


@pytest.mark.runs
@pytest.mark.parametrize(
    "name",
    [n if n in ("full", "lora") else pytest.param(n, marks=pytest.mark.exhaustive) for n in RUNS],
)
def test_the_same_weights_as_gathered(name: str, tmp_path: Path) -> None:
    """And what torchtune users do next works: a run starts from them."""
    kind, ranks, files, changes = RUNS[name]
    if name == "quantised":
        changes = quantised(tmp_path)
    changes = {**changes, **in_files(tmp_path, files)}
    train(kind, tmp_path / "gathered", ranks, **changes)
    train(kind, tmp_path / "sharded", ranks, **changes, **SHARDED)
    saved = tmp_path / "sharded" / "epoch_0"
    assert_same_content(tmp_path / "gathered" / "epoch_0", saved)
    durable.check_contents(saved, m := durable.read_manifest(saved), sorted(m.files))
    assert not (tmp_path / "sharded" / ".saving").exists()
    again = {**changes, "checkpointer.checkpoint_dir": str(saved)}
    again["checkpointer.checkpoint_files"] = sorted(each.name for each in saved.glob("model-*"))
    assert len(train(kind, tmp_path / "again", ranks, **again)) == 3


def run_failing(cfg: DictConfig, on: int, how: str) -> None:
    """A run in which a rank cannot write its file, or is killed before it does."""

    def fail(*_: Any, **__: Any) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device")

    where: Any = (os, "posix_fallocate") if how == "no room" else (_checkpointer, "save_file")
    with mock.patch.object(*where, fail) if os.environ["RANK"] == str(on) else mock.MagicMock():
        run_ours("full", cfg)


@pytest.mark.runs
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("how", ["no room", "not written"])
def test_a_rank_that_cannot_write_its_file(how: str, on: int, tmp_path: Path) -> None:
    """All ranks end with the reason, and the next run has the weights only to save."""
    changes = in_files(tmp_path, 3)
    cfg = tiny_config("full", tmp_path / "out", **changes, **SHARDED)
    with pytest.raises(AssertionError, match="CheckpointError: ") as raised:
        run_ranks(run_failing, 2, cfg, on, how, join=False)
    assert "The checkpoint epoch_0 could not be written to" in str(raised.value)
    assert "No space left on device" in str(raised.value)
    assert {each.name for each in (tmp_path / "out").glob("*epoch_*")} == {"dist_epoch_0"}
    assert train("full", tmp_path / "out", 2, **changes, **SHARDED, **RESUME) == []
    assert len(weights_in(tmp_path / "out" / "epoch_0")) > 9
    assert not (tmp_path / "out" / ".saving").exists()


@pytest.mark.runs
@pytest.mark.exhaustive
def test_a_rank_that_is_killed_while_it_writes_its_file(tmp_path: Path) -> None:
    changes = in_files(tmp_path, 3)
    cfg = tiny_config("full", tmp_path / "out", **changes, **SHARDED)
    left, killed = watch_ranks(run_failing, 2, cfg, 1, "killed", until_exit_of=[0, 1], join=False)
    assert killed.exit_code == -signal.SIGKILL and left.exit_code not in (0, None), left.said
    assert train("full", tmp_path / "out", 2, **changes, **SHARDED, **RESUME) == []
    assert len(weights_in(tmp_path / "out" / "epoch_0")) > 9
    assert not (tmp_path / "out" / ".saving").exists()
