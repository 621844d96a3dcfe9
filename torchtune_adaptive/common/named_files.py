"""What torch and safetensors save by the names of files, written through files that are opened here.

Those who save checkpoints give both of them names only. safetensors loses what the system says when it
closes a file: an error of a quota, or of a network filesystem.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safetensors import TensorSpec


@contextmanager
def saving_through(create: Callable[[Path], AbstractContextManager[Any]]) -> Iterator[None]:
    """A context in which ``torch.save`` and safetensors write into the files that ``create`` opens."""
    import safetensors.torch
    import torch

    save, serialize = torch.save, safetensors.torch.serialize_file

    def save_into(content: object, file: Any, *more: Any, **how: Any) -> None:
        if not isinstance(file, (str, os.PathLike)):
            return save(content, file, *more, **how)
        with create(Path(file)) as opened:
            return save(content, opened, *more, **how)

    def serialize_into(tensors: Any, filename: Any, metadata: Any = None) -> None:
        with create(Path(filename)) as opened:
            write_safetensors(opened, tensors, metadata)

    torch.save, safetensors.torch.serialize_file = save_into, serialize_into  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.save, safetensors.torch.serialize_file = save, serialize


def write_safetensors(
    file: Any, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None
) -> None:
    """Write tensors in safetensors' format: the length of a header, the header in JSON, and their bytes."""

    def place(name: str) -> tuple[float, str]:
        """Those of wide elements come first, so that all are aligned."""
        spec = tensors[name]
        return -spec.data_len / max(math.prod(spec.shape), 1), name

    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    names, end = sorted(tensors, key=place), 0
    for name in names:
        spec, begin = tensors[name], end
        end += spec.data_len
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        if size := tensors[name].data_len:
            file.write((ctypes.c_char * size).from_address(tensors[name].data_ptr))
