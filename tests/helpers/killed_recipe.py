"""A recipe that is killed, and started again by the same command, for ``ckpt-chaos``."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

from tests.helpers.recipes import run_ours, saved_weights, tiny_config

SAVES = {"save_every_n_steps": 2, "max_steps_per_epoch": 4, "resume_from_checkpoint": True}


def main(folder: str, kind: str, changes: str) -> None:
    """Beside the folder each rank writes a hash of the weights at the end, to the bit."""
    rank, ranks = os.environ.setdefault("RANK", "0"), os.environ.setdefault("WORLD_SIZE", "1")
    os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    os.environ.setdefault("MASTER_PORT", "0")
    cfg = tiny_config(kind, folder, **SAVES, **json.loads(changes))
    with suppress(SystemExit):  # of a run that has ended already
        run_ours(kind, cfg)
    hashed = hashlib.sha256()
    for name, weight in sorted(saved_weights(Path(folder, "epoch_0")).items()):
        hashed.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    Path(f"{folder}.{rank}").write_text(hashed.hexdigest())
    sys.stdout.flush()
