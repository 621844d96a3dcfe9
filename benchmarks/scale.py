"""What grows with ranks and rows, and how much: measured on one machine, for as many as 4,096 ranks.

    python benchmarks/scale.py [--plans]

Each quantity is that of one rank unless it says otherwise. No rank is real: a step is packed for so many, and
all signs of a beat go through one real key-value store, in a process of its own, from one client. ``--plans``
adds `tune-adaptive plan` for so many ranks, which takes minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from torchtune_adaptive.core.ranks.signs import Sign
from torchtune_adaptive.core.ranks.star import Star
from torchtune_adaptive.core.rows.order import SampleOrder
from torchtune_adaptive.core.sizes.packing import Budget, pack
from torchtune_adaptive.core.step.generators import Generators

RANKS = (8, 64, 1024, 4096)
ROWS_PER_RANK = 16
TIMES = 5
TENSORS_OF_70B = 723
PLAN = ("plan", "llama3_1/8B_full", "--no-what-ifs", "--gpu", "h100-80gb")


def median_of(take: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TIMES):
        started = time.perf_counter()
        take()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def packing(ranks: int) -> float:
    """Seconds to divide the rows of a step among the ranks, by a budget of tokens."""
    numbers = random.Random(ranks)
    lengths = [
        min(4096, max(1, int(numbers.lognormvariate(5.5, 1)))) for _ in range(ranks * ROWS_PER_RANK)
    ]
    budget = Budget.of_tokens(32_768, 4096)
    return median_of(lambda: pack(lengths, budget, ranks))


def serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv() is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)


class Signs:
    """All signs of a beat, through a store that another process serves."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=[theirs], daemon=True)
        self._process.start()
        port = self._pipe.recv()
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def beat(self, ranks: int) -> tuple[float, float]:
        """CPU seconds of the store, and of rank 0's Python, in a beat of all ranks."""
        beats = count(1)

        def own() -> Sign:
            return Sign("step 7", progress=7, patience=300.0, beats=next(beats))

        stars = [Star(self._store, rank, ranks, b"key", own) for rank in range(ranks)]
        for star in stars:
            star.publish()
        seen = []
        for _ in range(TIMES + 1):
            of_store, started = self._cpu(), time.process_time()
            stars[0].exchange()
            of_rank = time.process_time() - started
            for star in stars[1:]:
                star.exchange()
            seen.append((self._cpu() - of_store, of_rank))
        store, rank = zip(*seen[1:], strict=True)  # in the first, all signs are new
        return statistics.median(store), statistics.median(rank)

    def _cpu(self) -> float:
        self._pipe.send("?")
        used: float = self._pipe.recv()
        return used

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(60)


def ordering(rows: int, ranks: int, streaming: bool) -> tuple[float, float, float]:
    """Seconds to make a rank's order, bytes that it keeps, and seconds to find a step's 16 rows."""
    order = SampleOrder(rows, ranks, shuffle=True, streaming=streaming)
    tracemalloc.start()
    started = time.perf_counter()
    share = order.share(0, 1, ranks)
    seconds = time.perf_counter() - started
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, kept, median_of(lambda: share[1600:1616].tolist())


def saving_plans(ranks: int) -> tuple[float, float]:
    """Seconds of rank 0 to decide who writes what in a sharded checkpoint of 70B: in the first save, and in
    later ones."""
    properties, size = TensorProperties(dtype=torch.bfloat16), torch.Size([8192, 8192])
    part = torch.Size([8192 // ranks, 8192])

    def of_rank(rank: int) -> SavePlan:
        offset = torch.Size([part[0] * rank, 0])
        chunk = ChunkStorageMetadata(offset, part)
        return SavePlan(
            [
                WriteItem(
                    MetadataIndex(f"{kind}.layers.{number // 9}.{number % 9}.weight", offset),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, properties, size),
                )
                for number in range(TENSORS_OF_70B)
                for kind in ("model", "exp_avg", "exp_avg_sq")
            ]
        )

    # torch keeps plans by the name of the planner's class.
    planner_class = type(f"For{ranks}", (DefaultSavePlanner,), {})
    heard = [pickle.dumps(of_rank(rank)) for rank in range(ranks)]
    same = [pickle.dumps(SavePlan([], usable=False))] * ranks
    seconds = []
    for plans in (heard, same):
        planner = planner_class(flatten_state_dict=False, enable_plan_caching=True)
        started = time.perf_counter()
        planner.create_global_plan([pickle.loads(each) for each in plans])
        seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1]


def plan(ranks: int) -> float:
    """Seconds of a plan."""
    started = time.perf_counter()
    nodes = ["--nodes", f"{ranks // 8}x8"] if ranks > 8 else []
    command = [sys.executable, "-m", "torchtune_adaptive", *PLAN, "--nproc", str(ranks), *nodes]
    with tempfile.TemporaryDirectory() as empty:  # in place of a cache that may know the answer
        environment = {**os.environ, "XDG_CACHE_HOME": empty, "OMP_NUM_THREADS": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, check=True, env=environment, **quiet)  # type: ignore[call-overload]
    return time.perf_counter() - started


def row(name: str, values: list[Any]) -> None:
    print(f"{name:58}" + "".join(f"{value:>10}" for value in values), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--plans", action="store_true")
    asked = arguments.parse_args()
    print(f"\ntorch {torch.__version__}, {platform.machine()}, {platform.system()}\n")
    row("ranks", [f"{ranks:,}" for ranks in RANKS])
    row(
        f"a step's {ROWS_PER_RANK} rows a rank packed by a token budget, ms",
        [f"{1000 * packing(ranks):.1f}" for ranks in RANKS],
    )
    signs = Signs()
    beats = [signs.beat(ranks) for ranks in RANKS]
    signs.close()
    row(
        "signs of life, CPU of the store in a beat of all, ms",
        [f"{1000 * s:.0f}" for s, _ in beats],
    )
    row("signs of life, CPU of rank 0 in a beat, ms", [f"{1000 * r:.1f}" for _, r in beats])
    state = len(Generators(torch.device("cpu")).as_bytes())
    row("random states in a checkpoint, MB", [f"{state * ranks / 1e6:.2f}" for ranks in RANKS])
    saves = [saving_plans(ranks) for ranks in RANKS[:-1]]  # not of the most: that takes minutes
    row("a sharded checkpoint of 70B planned, first save, s", [f"{s:.1f}" for s, _ in saves])
    row("a sharded checkpoint of 70B planned, later saves, s", [f"{s:.1f}" for _, s in saves])
    if asked.plans:
        row(
            "plan of 8B full fine-tuning, without what-ifs, s",
            [f"{plan(ranks):.0f}" for ranks in RANKS],
        )
    print()
    row("rows, of 64 ranks", ["1e6", "1e7", "1e8", "1e9"])
    for name, streaming, sizes in (
        ("sample_order: torchtune", False, (10**6, 10**7, 10**8)),
        ("sample_order: streaming", True, (10**6, 10**7, 10**8, 10**9)),
    ):
        seen = [ordering(rows, 64, streaming) for rows in sizes]
        row(f"{name}, to begin an epoch, ms", [f"{1000 * s:.2f}" for s, _, _ in seen])
        row(f"{name}, kept, MB", [f"{kept / 1e6:.2f}" for _, kept, _ in seen])
        row(f"{name}, the rows of a step, ms", [f"{1000 * s:.2f}" for _, _, s in seen])


if __name__ == "__main__":
    main()
