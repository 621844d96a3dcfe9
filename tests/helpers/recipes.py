"""Run recipes, ours and torchtune's, inside the ranks of a test, and see what they log and save."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import getsource
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.compiler.config
import torch.distributed as dist
import torchtune
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from torchtune import training

from tests.helpers import tiny_vision
from torchtune_adaptive.recipe import tiny
from torchtune_adaptive.recipe.install import install
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.settings.kind_table import KINDS

RECORDS: list[dict[str, float]] = []
"""What the recipe of this process has logged, step by step."""


class Recorder:
    """A metric logger that keeps what it is given."""

    def __init__(self, **_: Any) -> None:
        RECORDS.clear()

    def log_config(self, config: DictConfig) -> None: ...

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        if payload.keys() & {"loss", "val_loss"}:  # the search's result is logged, too
            RECORDS.append({"step": step, **{key: float(value) for key, value in payload.items()}})

    def close(self) -> None: ...


def tiny_config(kind: str, output_dir: Path | str, **changes: Any) -> DictConfig:
    """The tiny config of a kind of recipe that does not search, with changes as on the command line."""
    vision = kind.endswith("_vision")
    file = tiny_vision.CONFIGS / f"{kind}.yaml" if vision else find_config(f"tiny/{kind}")
    base = OmegaConf.load(file)
    quick = {
        **({"assets": str(tiny_vision.assets())} if vision else {}),
        "output_dir": str(output_dir),
        "use_maximum_batch_size": False,
        "adaptive_batching.memory_limit": None,
        "adaptive_batching.cache": False,
        "batch_size": 4,
        "max_steps_per_epoch": 3,
        "epochs": 1,
        "clip_grad_norm": None,
        "metric_logger._component_": "tests.helpers.recipes.Recorder",
    }
    for key, value in {**quick, **changes}.items():
        OmegaConf.update(base, key, value, merge=False, force_add=True)
    return base


def run_ours(kind: str, cfg: DictConfig, draws: bool = False) -> list[dict[str, float]]:
    """Run our recipe in this process; what it logged (on rank 0)."""
    return run_recipe_at(f"recipes/{KINDS[kind].recipe}.py", cfg, draws)


def run_recipe_at(path: str, cfg: DictConfig, draws: bool = False) -> list[dict[str, float]]:
    """Run the recipe that a file of this repository defines.

    Drawing takes a tenth of the time of a run, so by default it is as where matplotlib is not installed.
    """
    module = _module_at(Path(__file__).parents[2] / path)
    recipe = _recipe_class(module)(cfg)
    with nullcontext() if draws else _without_matplotlib(), recipe.run:
        recipe.setup(cfg)
        recipe.train()
    recipe.cleanup()
    return list(RECORDS)


@contextmanager
def _without_matplotlib() -> Iterator[None]:
    name = "matplotlib.figure"
    imported = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ImportError
    try:
        yield
    finally:
        del sys.modules[name]
        if imported is not None:
            sys.modules[name] = imported


def run_torchtunes(kind: str, cfg: DictConfig) -> list[dict[str, float]]:
    """Run torchtune's own recipe, with the three lines replaced that cannot run on a CPU."""
    training.get_memory_stats = lambda device, reset_stats=True: {}
    training.log_memory_stats = lambda stats, message="": None
    training.cleanup_before_training = lambda: None
    folder = Path(torchtune.__file__).parent.parent / "recipes"
    module = _module_at(folder / f"{KINDS[kind].torchtunes}.py")
    recipe_class = _recipe_class(module)
    if "init_process_group" not in getsource(recipe_class.__init__):  # some do it themselves
        dist.init_process_group("gloo")
    recipe = recipe_class(cfg)
    recipe.setup(cfg)
    recipe.train()
    recipe.cleanup()
    return list(RECORDS)


def run_torchtunes_single_device(kind: str, cfg: DictConfig) -> list[dict[str, float]]:
    """Run torchtune's own recipe for a single device."""
    folder = Path(torchtune.__file__).parent.parent / "recipes"
    module = _module_at(folder / f"{kind}_finetune_single_device.py")
    name = "LoRAFinetuneRecipeSingleDevice" if kind == "lora" else "FullFinetuneRecipeSingleDevice"
    recipe = getattr(module, name)(cfg)
    recipe.setup(cfg)
    recipe.train()
    recipe.cleanup()
    return list(RECORDS)


def in_files(folder: Path, number: int) -> dict[str, Any]:
    """What makes a tiny config one of a model whose weights are in so many files; of ``quantised``'s in the
    same folder, if that is there."""
    assets = folder / "assets"
    if not assets.exists():
        assets.mkdir()
        tiny.make(assets)
    [alone] = assets.glob("*.safetensors")
    weights = load_file(alone)
    alone.unlink()
    names = [f"model-{each + 1:05}-of-{number:05}.safetensors" for each in range(number)]
    for each, name in enumerate(names):
        some = {key: weights[key] for key in sorted(weights)[each::number]}
        save_file(some, assets / name, metadata={"format": "pt"})
    return {"assets": str(assets), "checkpointer.checkpoint_files": names}


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights that a run saved, from its files."""
    return {
        f"{path.relative_to(folder)}:{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _recipe_class(module: ModuleType) -> Any:
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and hasattr(value, "train")
    )


def _module_at(path: Path) -> ModuleType:
    install()  # torchtune's recipes, too, read the tiny configs
    name = f"recipe_under_test_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def quantised(folder: Path) -> dict[str, Any]:
    """What makes the tiny LoRA config one of QLoRA."""
    size = {
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 4,
        "embed_dim": 256,
        "intermediate_dim": 256,
    }
    assets = folder / "assets"
    assets.mkdir()
    tiny.make(assets, size)
    return {
        "assets": str(assets),
        "model.quantize_base": True,
        "batch_size": 2,
        **{f"model.{key}": value for key, value in size.items()},
    }
