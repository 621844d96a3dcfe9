"""All private interfaces of torch and transformers that the library needs, as there is no public way.

Each was checked on torch 2.11, 2.13 and 2.15, where it does not say otherwise.
"""

# ruff: noqa: F401 - what is imported here is for the other modules of the package
from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Fake tensors have shapes, but no memory; dispatch modes see each operation; trees are nested arguments.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# The product of two matrices of integers of 8 bits (checked on torch 2.13).
int_mm = torch._int_mm


def saved(node: Any, name: str, default: Any = None) -> Any:
    """A value that a node of the graph has saved for backward, as the ``reduction`` of torch's losses."""
    return getattr(node, f"_saved_{name}", default)


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to a model or a part of it: what ``module.compile()`` sets, and
    what the wrapper of ``torch.compile(module)`` has (torch 2.13)."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def scaler_of(optimizer: Any) -> Any:
    """The gradient scaler of an optimizer that accelerate, Lightning or its Fabric has wrapped, or None.

    Lightning's is in the precision plugin of the strategy, which its optimizers hold (2.6).
    """
    strategy = getattr(optimizer, "_strategy", None)
    plugin = getattr(strategy, "precision", None) or getattr(strategy, "precision_plugin", None)
    return getattr(plugin or optimizer, "scaler", None)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model of transformers (5.23), by the names of the classes that are not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def attends_by_sdpa(model: Any) -> bool:
    """Whether a model of transformers (5.23) computes attention by torch's function for it."""
    return getattr(model.config, "_attn_implementation", None) == "sdpa"


def converted_like(model_type: str) -> str:
    """The type of model whose checkpoints of transformers 4 are converted as those of this one (5.23), as
    PEFT reads it; empty if there is none."""
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    types: dict[str, str] = {
        **_MODEL_TO_CONVERSION_PATTERN,
        "mixtral": "mixtral",
    }  # which PEFT adds
    return types.get(model_type, "")
