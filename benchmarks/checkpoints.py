"""What saving a checkpoint costs: gathered on rank 0, sharded, in the background, and as a snapshot.

    python benchmarks/checkpoints.py [--ranks 4] [--layers 14] [--rounds 2]

The same runs of full fine-tuning with AdamW, on a Llama of about 1 GB in fp32, take turns. Each saves after
every step. *Still* is how long training stands still for a save, with the wait for one that is being
written; of the saves after the first, which makes groups, threads and buffers, the median. *Host memory* is
what rank 0 has more in a save than before it, in memory that no file backs.

Runs on the CPU. All ranks share its cores and one disk, which a cluster's do not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, tiny_config
from torchtune_adaptive.recipe import tiny
from torchtune_adaptive.recipe.checkpoints.checkpoints import Checkpoints

SHARDED = "adaptive_batching.sharded_checkpoints"
EVERY = 1  # steps
SAVE = {"save_every_n_steps": EVERY}
WAYS: dict[str, dict[str, Any]] = {
    "gathered": {SHARDED: False, **SAVE},
    "sharded": {SHARDED: True, **SAVE},
    "in the background": {SHARDED: "background", **SAVE},
    "a snapshot": {SHARDED: False, "adaptive_batching.snapshot_every_n_steps": EVERY},
}
SIZE = {"num_heads": 16, "num_kv_heads": 16, "embed_dim": 1024, "intermediate_dim": 4096}
SAVES = 3


def anonymous_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("Anonymous:")]
    return int(line.split()[1]) << 10


@contextmanager
def peak_of_memory(peaks: list[int]) -> Iterator[None]:
    """Notes how much more memory than at the beginning this process has had."""
    before, most, done = anonymous_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, anonymous_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        peaks.append(max(most, anonymous_bytes() - before))


def train(cfg: DictConfig) -> tuple[list[float], int]:
    """Seconds that training stood still for each save, and bytes of this rank in one."""
    seconds, peaks = list[float](), list[int]()

    def timed(save: Callable[..., None]) -> Callable[..., None]:
        def save_timed(*arguments: Any) -> None:
            *_, last = arguments
            with peak_of_memory(peaks):
                started = time.perf_counter()
                save(*arguments)
            if last is not True:  # a run's end has its weights gathered as well
                seconds.append(time.perf_counter() - started)

        return save_timed

    with (
        mock.patch.object(Checkpoints, "save", timed(Checkpoints.save)),
        mock.patch.object(Checkpoints, "snapshot", timed(Checkpoints.snapshot)),
    ):
        run_ours("full", cfg)
    return seconds, max(peaks[:-1])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--layers", type=int, default=14)
    arguments.add_argument("--rounds", type=int, default=2)
    asked = arguments.parse_args()
    size = {**SIZE, "num_layers": asked.layers}
    seen: dict[str, list[tuple[list[float], int]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder) / "assets"
        assets.mkdir()
        os.environ["TMPDIR"] = folder
        tiny.make(assets, size)
        weights = sum(file.stat().st_size for file in assets.glob("*.safetensors"))
        for round_ in range(asked.rounds):
            for way, setting in WAYS.items():
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    cfg = tiny_config(
                        "full",
                        out,
                        assets=str(assets),
                        batch_size=1,
                        epochs=1,
                        max_steps_per_epoch=SAVES * EVERY + 1,
                        **{"tokenizer.max_seq_len": 32},
                        **{f"model.{key}": value for key, value in size.items()},
                        **setting,
                    )
                    first, *_ = run_ranks(train, asked.ranks, cfg, timeout=1800, join=False)
                    seen[way].append(first)
                print(f"round {round_ + 1}: {way}", file=sys.stderr)
    print(
        f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}; {weights:,} bytes "
        f"of weights in fp32, AdamW, {asked.ranks} ranks, {asked.rounds} rounds of {SAVES} saves\n"
    )
    print(f"{'':20}{'still, s':>10}{'quartiles':>14}{'rank 0, MB':>12}")
    for way, rounds in seen.items():
        seconds = [each for saves, _ in rounds for each in saves[1:]]
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        memory = statistics.median(most for _, most in rounds)
        print(f"{way:20}{middle:>10.1f}{f'{low:.1f} {high:.1f}':>14}{memory / 1e6:>12.0f}")


if __name__ == "__main__":
    main()
