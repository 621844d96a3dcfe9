"""All private interfaces of torch and transformers that the library needs, as there is no public way.

Each was checked on torch 2.11, 2.13 and 2.15, where it does not say otherwise.
"""

# ruff: noqa: F401 - what is imported here is for the other modules of the package
from __future__ import annotations

from typing import Any

from torch import nn

# Fake tensors have shapes, but no memory; dispatch modes see each operation; trees are nested arguments.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


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
