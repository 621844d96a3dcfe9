"""Sharded checkpoints from somebody else: what they hold is data, and none of it is run."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.helpers.runs import ALL_KEPT, RESUME, refused, undisturbed
from torchtune_adaptive.common import durable

pytestmark = [pytest.mark.runs]

CHANGES = {
    **{"adaptive_batching.sharded_checkpoints": True, "save_every_n_steps": 1},
    **{"max_steps_per_epoch": 2, "epochs": 1},
}


class Program:
    """Leaves a mark when it is unpickled, and is then what a checkpoint has there."""

    def __init__(self, mark: Path, true: bytes) -> None:
        self.code = f"open({str(mark)!r}, 'w').close() or __import__('pickle').loads({true!r})"

    def __reduce__(self) -> Any:
        return eval, (self.code,)


def as_metadata(folder: Path, mark: Path) -> None:
    file = folder / ".metadata"
    file.write_bytes(pickle.dumps(Program(mark, file.read_bytes())))
    seal(folder, file)


def as_a_value(folder: Path, mark: Path) -> None:
    """Among what is no tensor, as an optimizer's settings are."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    kinds = metadata.state_dict_metadata
    for index, stored in metadata.storage_data.items():
        if isinstance(kinds[index.fqn], BytesStorageMetadata):
            part = folder / stored.relative_path
            hostile = io.BytesIO()
            torch.save(Program(mark, pickle.dumps(0)), hostile)
            stored.offset, stored.length = part.stat().st_size, len(hostile.getvalue())
            with part.open("ab") as content:
                content.write(hostile.getvalue())
            seal(folder, part)
    file.write_bytes(pickle.dumps(metadata))
    seal(folder, file)


def seal(folder: Path, file: Path) -> None:
    """Correct a manifest, as whoever makes such a checkpoint would."""
    manifest = folder / durable.MANIFEST
    content = json.loads(manifest.read_text())
    true = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    content["files"][str(file.relative_to(folder))] = true
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("hidden", [as_metadata, as_a_value])
def test_no_program_in_a_sharded_checkpoint_is_run(
    hidden: Callable[[Path, Path], None], ranks: int, tmp_path: Path
) -> None:
    saved, _ = undisturbed("full", ranks, **CHANGES, **ALL_KEPT)
    name, mark = "epoch_0_step_1", tmp_path / "mark"
    shutil.copytree(saved / name, tmp_path / "out" / name)
    hidden(tmp_path / "out" / name, mark)
    said = refused("CheckpointError", "full", tmp_path / "out", ranks, **CHANGES, **RESUME)
    assert f"{name}: cannot be loaded (UnpicklingError: " in said
    assert not mark.exists()
