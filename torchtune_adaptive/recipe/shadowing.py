"""Notices a file in the working directory that is imported in place of a library or a recipe.

``python -m``, and so ``torchrun -m`` and ``tune run`` with several ranks, looks for modules in the working
directory first: a ``datasets.py`` there hides the library of that name.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from torchtune_adaptive.common import end, launcher

_LIBRARIES = """
PIL datasets dill filelock fsspec huggingface_hub matplotlib multiprocess numpy omegaconf packaging pandas
psutil pyarrow safetensors sentencepiece sympy tiktoken tokenizers torch torchao torchdata torchtune tqdm
typing_extensions yaml
"""


def stop_if_shadowed() -> None:
    """End the program with one line where a library is hidden; warn where the recipe or this package is.

    Copies of those two may be meant; a library's name on a user's file never is.
    """
    for name in _LIBRARIES.split():
        if found := shadowing(name):
            end(
                f"{found} hides the library {name}, because Python looks in the working directory first. "
                "Rename it, or start from another directory."
            )
    recipe = Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem
    for name in ("torchtune_adaptive", recipe):
        if (found := shadowing(name)) and launcher.rank() == 0:
            print(f"Using {found} in place of the installed {name}.", file=sys.stderr)


def shadowing(name: str) -> Path | None:
    """The file in the working directory that is imported as ``name`` though another one is installed.

    A working directory that stands in ``PYTHONPATH`` is meant to come first, and hides nothing.
    """
    try:
        here = Path.cwd()
    except OSError:  # it was deleted
        return None
    meant = {Path(entry).absolute() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    if not name or (os.environ.get("PYTHONPATH") and here in meant):
        return None
    found = _file(name, sys.path)
    if found is None or here not in (found.parent, found.parent.parent):
        return None
    elsewhere = _file(name, [entry for entry in sys.path if Path(entry).absolute() != here])
    return None if elsewhere is None or elsewhere.samefile(found) else found


def _file(name: str, path: list[str]) -> Path | None:
    spec = PathFinder.find_spec(name, path)
    return None if spec is None or spec.origin is None else Path(spec.origin).absolute()
