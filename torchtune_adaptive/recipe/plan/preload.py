"""Imports of the server that tracing processes are forked from, without the messages of other packages.

Everything here is waited for before the first trace. torchtune imports Hugging Face's ``datasets``, and with
it pandas and pyarrow, only to load data. A trace has none, so it is put off until data are loaded.
"""

import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_NEEDED = {"datasets": "load_dataset", "datasets.distributed": "split_dataset_by_node"}
"""Functions that torchtune takes from it, by module."""


@contextmanager
def _importing_later(functions: dict[str, str]) -> Iterator[None]:
    """A context in which modules get these functions without their module being imported, which the first
    call does; afterwards, the modules are imported as always."""
    stands_in = [name for name in functions if name not in sys.modules]
    for name in stands_in:
        sys.modules[name] = module = ModuleType(name)
        setattr(module, functions[name], _imported_when_called(name, functions[name]))
    try:
        yield
    finally:
        for name in stands_in:
            del sys.modules[name]


def _imported_when_called(module: str, function: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(module), function)(*arguments, **named)

    return call


logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

gc.disable()  # collections while modules are imported take a fifth of the time, and find nothing
with _importing_later(_NEEDED):
    import torchtune_adaptive.recipe.plan.limits
    import torchtune_adaptive.recipe.tracing.self_check  # noqa: F401
gc.freeze()
gc.enable()
