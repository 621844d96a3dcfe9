"""A resumed run maps its files: no rank copies the whole state, and nobody holds it while searching."""

from __future__ import annotations

import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torchtune.models.llama2 import llama2

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, tiny_config
from tests.helpers.runs import (
    ALL_KEPT,
    RESUME,
    Records,
    assert_same_end,
    assert_same_weights,
    named_checkpoint,
    train,
    undisturbed,
)
from torchtune_adaptive.common.durable import MANIFEST
from torchtune_adaptive.recipe.checkpoints.all_or_none import read_file
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints
from torchtune_adaptive.recipe.rollout_run import RolloutRun
from torchtune_adaptive.recipe.run import Run

pytestmark = pytest.mark.runs

SHARE = 0.1
"""The share of a checkpoint by which memory may grow."""


def anonymous_bytes() -> int:
    """The memory of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("Anonymous:")]
    return int(line.split()[1]) << 10


def mapped_files() -> set[str]:
    """The checkpoint files that are mapped into this process, with those that have been deleted.

    A single process on a CPU has its weights where they were read, which is no harm; not so the state.
    """
    names = r"\.(pt|bin|safetensors|distcp)\b" if dist.get_world_size() > 1 else r"state\.pt\b"
    paths = (line[line.find("/") :] for line in Path("/proc/self/maps").read_text().splitlines())
    return {path for path in paths if re.search(names, path)}


def mapped_for_long() -> set[str]:
    """Those that are not let go of in a moment: a thread of gloo's may still drop the last tensor that it
    has sent."""
    until = time.monotonic() + 60
    while (found := mapped_files()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if hasattr(state, "__tensor_flatten__"):
        yield from (getattr(state, name) for name in state.__tensor_flatten__()[0])
    elif isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for one in state.values() if isinstance(state, dict) else state:
            yield from tensors_in(one)


def resumed(kind: str, cfg: DictConfig) -> tuple[int, int, set[str], Records]:
    """Resume a run. By how many bytes memory grows while it reads the checkpoint; what is held of it when the
    search begins, as bytes of tensors and as mapped files; and what is logged."""
    load = Checkpoints.load
    grown, tensors = [], []
    held: dict[str, Any] = {}

    def load_and_measure(self: Checkpoints) -> dict[str, Any]:
        before = anonymous_bytes()
        loaded = load(self)
        grown.append(anonymous_bytes() - before)
        tensors.extend(weakref.ref(one) for one in tensors_in(loaded))
        return loaded

    def looking(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def look_and_prepare(*arguments: Any) -> Any:
            alive = [one for tensor in tensors if (one := tensor()) is not None]
            held["bytes"] = sum(one.nbytes for one in alive)
            held["files"] = mapped_for_long()
            del alive
            return prepare(*arguments)

        return look_and_prepare

    Checkpoints.load = load_and_measure  # type: ignore[method-assign]
    for run in (Run, RolloutRun):
        run.prepare = looking(run.prepare)  # type: ignore[method-assign]
    records = run_ours(kind, cfg)
    in_place = cfg.get("enable_async_checkpointing", False)  # a sharded one is read into the model
    assert not tensors if in_place else tensors
    return grown[0], held["bytes"], held["files"], records


def large_run(folder: Path, width: int) -> dict[str, Any]:
    """The base of a model of which weights and optimizer's state are large, and the config for it."""
    shape = {"vocab_size": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4}
    shape |= {"embed_dim": width, "intermediate_dim": 4 * width, "max_seq_len": 512}
    model = llama2(**shape)
    base = folder / "base"
    base.mkdir()
    torch.save(model.state_dict(), base / "model.pt")
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(base),
        "checkpoint_files": ["model.pt"],
        "recipe_checkpoint": None,
        "output_dir": str(folder / "out"),
        "model_type": "LLAMA2",
    }
    return {
        "model": {"_component_": "torchtune.models.llama2.llama2", **shape},
        "checkpointer": checkpointer,
        "max_steps_per_epoch": 1,
        "batch_size": 2,  # also for two ranks, which keep the global batch
        "dataset.train_on_input": True,
        "tokenizer.max_seq_len": 16,
    }


@pytest.mark.parametrize("width", [512, pytest.param(1792, marks=pytest.mark.exhaustive)])
def test_reading_a_checkpoint_takes_no_memory_on_any_rank(width: int, tmp_path: Path) -> None:
    """One that a single rank saved, of 0.1 and 1.3 GB."""
    changes = large_run(tmp_path, width)
    train("full", tmp_path / "out", **changes, epochs=1)
    size = size_of(tmp_path / "out" / "epoch_0")
    assert size > 200 * width**2
    cfg = tiny_config("full", tmp_path / "out", **changes, epochs=2, **RESUME)
    for grown, held, files, _ in run_ranks(resumed, 2, "full", cfg, join=False):
        assert grown < SHARE * size
        assert held < SHARE * size and not files


TWICE = {"max_steps_per_epoch": 1, "epochs": 2}
OF_ROLLOUTS = {"dataset.split": "train[:8]", "max_generated_tokens": 8, "max_steps_per_epoch": None}
OF_GRPO = {**OF_ROLLOUTS, "batch_size": 4, "grpo_samples": 2, "num_steps": 2}
OF_PPO = {**OF_ROLLOUTS, "batch_size": 4, "ppo_batch_size": 2, "num_steps": 16}
EIGHT_BIT = {"_component_": "torchao.optim.AdamW8bit", "lr": 3e-3}
RESUMED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "on one rank": ("full", 1, {}, {}),
    "on several ranks": ("full", 2, {}, {}),
    "with the optimizer in backward": ("full", 2, {"optimizer_in_bwd": True}, {}),
    "by the names of files": ("full", 1, {}, named_checkpoint("full")),
    "adapters": ("lora", 2, {}, {}),
    "adapters by the names of files": ("lora", 1, {}, named_checkpoint("lora")),
    "asynchronous": ("full", 2, {"enable_async_checkpointing": True}, {}),
    "distillation": ("kd", 1, {}, {}),
    "GRPO": ("grpo", 2, OF_GRPO, {}),
    "PPO": ("ppo", 2, OF_PPO, {}),
}
QUANTIZED = {
    "quantized state": {"optimizer": EIGHT_BIT},
    "quantized state in backward": {"optimizer": EIGHT_BIT, "optimizer_in_bwd": True},
}
"""Its kernels are compiled, which takes most of a minute."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", QUANTIZED.values(), ids=QUANTIZED)
def test_nothing_is_held_of_a_quantized_state(changes: dict[str, Any], tmp_path: Path) -> None:
    test_nothing_is_held_of_a_checkpoint_during_the_search("full", 1, changes, {}, tmp_path)


@pytest.mark.rotating
@pytest.mark.parametrize(("kind", "ranks", "changes", "named"), RESUMED.values(), ids=RESUMED)
def test_nothing_is_held_of_a_checkpoint_during_the_search(
    kind: str, ranks: int, changes: dict[str, Any], named: dict[str, Any], tmp_path: Path
) -> None:
    """Nor during the training that follows, which removes the state of older checkpoints; it is exact."""
    changes = {**TWICE, **changes}
    folder, whole = undisturbed(kind, ranks, **ALL_KEPT, **changes)
    first = "dist_epoch_0" if "enable_async_checkpointing" in changes else "epoch_0"
    shutil.copytree(folder / first, tmp_path / first, symlinks=True)
    if named:
        (tmp_path / first / MANIFEST).unlink()
    cfg = tiny_config(kind, tmp_path, **changes, **(named or RESUME))
    for _, held, files, records in run_ranks(resumed, ranks, kind, cfg, join=False):
        assert held < SHARE * size_of(tmp_path / first) and not files
        if records:
            assert_same_end(records, whole)
    assert_same_weights(folder / "epoch_1", tmp_path / "epoch_1")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_is_mapped_if_it_can_be(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    state = {"numbers": torch.arange(1 << 20), "name": "x"}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    read = read_file(str(path))
    assert ("state.pt" in Path("/proc/self/maps").read_text()) == zipped
    read["numbers"][0] = 7
    path.unlink()
    assert read["numbers"][:3].tolist() == [7, 1, 2] and read["name"] == "x"
    path.write_bytes(content)
    assert read_file(str(path))["numbers"][0] == 0  # what is written to a tensor stays in memory


def size_of(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
