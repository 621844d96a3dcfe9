"""torch's reader of its distributed format, which it reads as a program: here, as data."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
)
from torch.distributed.checkpoint.metadata import StorageMeta

from torchtune_adaptive.recipe.checkpoints.folder import TORCH_METADATA

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *(
        ("torch.distributed.checkpoint.filesystem", name)
        for name in ("_StorageInfo", "_StoragePrefix")
    ),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
"""What torch 2.11 to 2.15 pickle into ``.metadata``, by module, besides the types of tensors."""


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what metadata is made of."""

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_type and (module, name) not in _NAMES:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is no part of a checkpoint"
            )
        return super().find_class(module, name)


class Planner(DefaultLoadPlanner):
    """torch's, whose values that are no tensors may be programs, and which wants state of all parameters."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Drop the state of parameters that had none when it was saved, as they had had no gradient yet."""
        assert metadata is not None
        names = (each.split(".") for each in metadata.state_dict_metadata)
        saved = {prefix for parts in names for prefix in accumulate(parts, "{}.{}".format)}
        _drop_unsaved(state_dict, "", saved)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        data = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), data)
        data.seek(0)
        super().load_bytes(read_item, data)


def _drop_unsaved(values: dict[str, Any], prefix: str, saved: set[str]) -> None:
    """Drop parameters' state that has not been saved from the optimizers in a state."""
    for key, value in values.items():
        if isinstance(value, dict) and value.keys() == {"state", "param_groups"}:
            for parameter in [*value["state"]]:
                if f"{prefix}{key}.state.{parameter}" not in saved:
                    del value["state"][parameter]
        elif isinstance(value, dict):
            _drop_unsaved(value, f"{prefix}{key}.", saved)


class Reader(FileSystemReader):
    """torch's, of files that may have to be fetched before.

    Raises:
        UnpicklingError: the metadata names what could run.
    """

    def __init__(self, folder: Path, fetch: Callable[[set[str]], None]) -> None:
        super().__init__(folder)
        self._fetch = fetch
        with (folder / TORCH_METADATA).open("rb") as file:
            self._metadata: Metadata = _Unpickler(file).load()
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        self._fetch({self.storage_data[each.storage_index].relative_path for each in plan.items})
        return super().read_data(plan, planner)
