"""All private interfaces of torch and torchtune that recipes need, as there is no public way.

Each was checked on torchtune 0.6.1, its last release, with torch 2.13, where it does not say otherwise. None
of the two is imported with this module, which would take seconds.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

TORCHTUNE_LOGGER = "torchtune.utils._logging"
"""The logger of ``torchtune.utils.get_logger``, which is named after its module."""


def recipe_registry(torchtune: Path) -> ModuleType:
    """torchtune's registry of recipes: loaded by its file, because ``import torchtune`` takes seconds; under
    its own name, so that torchtune finds the same lists later."""
    name = "torchtune._recipe_registry"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, torchtune / "_recipe_registry.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def component_at(path: str) -> Callable[..., Any]:
    """What ``_component_`` names in a config."""
    from torchtune.config._utils import _get_component_from_path

    return _get_component_from_path(path)


def sft_transform() -> Any:
    """What makes tokens and labels of a row, as datasets for fine-tuning do it; also on main (bd2a0fc)."""
    from torchtune.datasets._sft import SFTTransform

    return SFTTransform


def fingerprint(dataset: Any) -> str | None:
    """Hugging Face's own name for what a dataset of torchtune holds, where there is one."""
    return getattr(getattr(dataset, "_data", None), "_fingerprint", None)


def columns(dataset: Any) -> list[str] | None:
    """The columns of the table that a dataset of torchtune makes its rows of, where there is one."""
    return getattr(getattr(dataset, "_data", None), "column_names", None)


def has_quantized_base(lora: Any) -> bool:
    """Whether the weights that a LoRA layer adapts are quantized."""
    return getattr(lora, "_quantize_base", False)


def offloading_module() -> Any:
    """The module in which torchtune offloads activations, by the ``torch`` that it has imported."""
    from torchtune.training import _activation_offloading

    return _activation_offloading


def training_progress(**how_far: Any) -> dict[str, Any]:
    """A recipe's state, as torchtune keeps it in checkpoints; on main it has more keys."""
    from torchtune.training.checkpointing._checkpoint_client import TrainingProgress

    return TrainingProgress(**how_far).state_dict()


def initialize_state(optimizer: Any) -> None:
    """Give an optimizer the state that its first step would make, for a checkpoint to be loaded into."""
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(optimizer)


def rotate_context_by(method: str) -> None:
    """Choose how ranks exchange keys and values in context parallelism, as torchtune's main does."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)


def wait_for(tensor: Any) -> None:
    """Wait for a tensor if it is the result of a functional collective."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        tensor.trigger_wait()


def files_of_weights(checkpointer: Any) -> int:
    """The number of files that a checkpointer of torchtune's writes, once it has loaded weights."""
    from torchtune.training import FullModelHFCheckpointer

    if type(checkpointer) is not FullModelHFCheckpointer:
        return 1
    return len(set(checkpointer._weight_map.values()))


def knows_files(checkpointer: Any) -> bool:
    """Whether a checkpointer of torchtune's can save weights without having loaded any. Where it has to know
    their files, it is told: only names are read in them."""
    from safetensors import safe_open
    from torchtune import training

    if type(checkpointer) is not training.FullModelHFCheckpointer:
        others = (training.FullModelMetaCheckpointer, training.FullModelTorchTuneCheckpointer)
        return type(checkpointer) in others
    checkpointer._weight_map = {}
    for number, path in enumerate(map(str, checkpointer._checkpoint_paths), 1):
        if not path.endswith(".safetensors"):
            return False
        with safe_open(path, "pt") as file:
            checkpointer._weight_map |= dict.fromkeys(file.keys(), f"{number:04}")
    return True


def writing_one_file(checkpointer: Any, folder: Path) -> Any:
    """A ``FullModelHFCheckpointer`` that writes into ``folder``, and all that it is given into one file."""
    writer = copy.copy(checkpointer)
    writer._output_dir = folder
    writer._weight_map = defaultdict(lambda: "0001")
    return writer


@contextmanager
def attending_with(module: Any, attention: Callable[..., Any]) -> Iterator[None]:
    """A context in which a module of torchtune attends with another function of queries, keys and values."""
    usual = module._attention_call
    module._attention_call = attention
    try:
        yield
    finally:
        module._attention_call = usual


def without_compiling() -> AbstractContextManager[Any]:
    """A context in which compiled layers run eager; torch's own imports the compiler, which takes seconds."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing has been compiled
    import torch

    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
