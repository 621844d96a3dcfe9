"""torchvision for the tests of images, next to a torch that it was not built for.

The index that CI installs from has torch for CPUs, but torchvision only as it was built for CUDA: its kernels
cannot be loaded, and one of its modules then fails because two operators are missing. Images are cut into
tiles without kernels, so it is enough that the operators exist. `make` puts torchvision into a folder of its
own, where nothing else finds it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(sys.prefix) / "torchvision"
_library: torch.library.Library | None = None


def use_torchvision() -> None:
    """Make torchvision importable in this process, or skip the test that asks."""
    global _library
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if find_spec("torchvision") is None:
        pytest.skip("torchtune's vision models need torchvision", allow_module_level=True)
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "DEF")  # undone when it is freed
        for operator in ("nms", "qnms"):
            _library.define(
                f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        import torchvision  # noqa: F401


@contextmanager
def without_torchvision() -> Iterator[None]:
    """A context in which processes are started that do not find it: transformers cannot use this one."""
    before = sys.path[:]
    sys.path[:] = [folder for folder in before if folder != str(FOLDER)]
    try:
        yield
    finally:
        sys.path[:] = before
