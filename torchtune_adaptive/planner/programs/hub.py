"""The Hugging Face Hub as a plan asks it: for configs and tokenizers, never for weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs.imports import WhenImported, put

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def follow(imports: WhenImported) -> None:
    """Ask nobody for weights from now on."""
    imports.call("huggingface_hub.file_download", _of_downloads)
    imports.call("kernels", refuse_kernels)
    imports.call("safetensors.torch", lambda it: put(it, "load_file", _of_there(it.load_file)))
    put(torch, "load", _of_there(torch.load))


def refuse_kernels(kernels: Any) -> None:
    """Let nobody load kernels of the Hub, which are code: a model's config may name them."""

    def refused(repo_id: str, *_: Any, **__: Any) -> NoReturn:
        raise NoPrediction(
            f"{repo_id}: code of the Hub, which a plan does not run. Use an implementation of attention, or "
            "of experts, that is part of an installed package."
        )

    for name in ("get_kernel", "get_local_kernel", "get_locked_kernel"):
        if hasattr(kernels, name):
            put(kernels, name, refused)


def _of_downloads(downloads: Any) -> None:
    download = downloads.hf_hub_download

    def downloaded(repo_id: str, filename: str, *arguments: Any, **options: Any) -> Any:
        """A file; an empty one where there are weights that are not on this machine."""
        if not filename.endswith(_WEIGHTS):
            return download(repo_id, filename, *arguments, **options)
        try:
            return download(repo_id, filename, *arguments, **{**options, "local_files_only": True})
        except OSError:
            path = os.path.join(tempfile.mkdtemp(), os.path.basename(filename))
            open(path, "w").close()
            return path

    put(downloads, "hf_hub_download", downloaded)


def _of_there(read: Callable[..., Any]) -> Callable[..., Any]:
    """Reading weights that may be none.

    Raises:
        NoPrediction: they are none.
    """

    def of_there(file: Any, *arguments: Any, **options: Any) -> Any:
        if (
            isinstance(file, (str, os.PathLike))
            and os.path.isfile(file)
            and not os.path.getsize(file)
        ):
            raise NoPrediction(
                f"{os.path.basename(file)}: a plan downloads no weights, and the program reads this file of "
                "them. Download it before, or make the model by from_pretrained, which needs its config only."
            )
        return read(file, *arguments, **options)

    return of_there
