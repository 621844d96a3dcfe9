"""What dropout by sample costs beside `nn.Dropout`: forward and backward, in time and peak bytes.

    python benchmarks/dropout.py [--rounds 40] [--device cuda]

Rows of several sizes are dropped by torch, by sample as a CPU does it (in parts), and by sample as a GPU does
it (compiled to one kernel, which needs a C++ compiler on a CPU). They take turns, and a ratio is that of the
median times. On a CPU the time is that of the thread, so other work on the machine slows all of them; the
peak is what the process grows by, which the kernel of the system counts by pages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torchtune.modules.peft import LoRALinear

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchtune_adaptive.core.step.sample_dropout import SampleDropout, drop_by_kernel, drop_in_parts

SHARE = 0.1
SHAPES = [(4, 512, 1024), (16, 128, 4096)]
RANK = 16
WAYS = ("torch", "sample", "compiled")
Case = tuple[str, tuple[int, ...], torch.dtype]


def layer_of(way: str) -> nn.Module:
    if way == "torch":
        return nn.Dropout(SHARE)
    compiled = way == "compiled"
    return SampleDropout(SHARE, drop_by_kernel() if compiled else drop_in_parts)


def adapted(way: str, width: int) -> nn.Module:
    """A layer of LoRA, whose adapters are trained."""
    layer = LoRALinear(width, width, RANK, 2 * RANK, dropout=SHARE)
    layer.weight.requires_grad_(False)
    layer.dropout = layer_of(way)
    return layer


class Timed:
    """Forward and backward of a layer, again and again."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._layer = layer.to(DEVICE, dtype)
        self._rows = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
        self._upstream = torch.randn_like(self._rows)

    def run(self) -> None:
        self._rows.grad = None
        self._layer(self._rows).backward(self._upstream)

    def seconds(self) -> float:
        clock = time.thread_time if DEVICE.type == "cpu" else time.perf_counter
        wait()
        before = clock()
        self.run()
        wait()
        return clock() - before

    def peak(self) -> int:
        """Bytes that it takes at most, its gradient included, besides the rows and what comes from above."""
        self._rows.grad = None
        if DEVICE.type == "cpu":
            before = pages("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            self.run()
            return pages("VmHWM") - before
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run()
        return torch.cuda.max_memory_allocated() - before


def wait() -> None:
    if DEVICE.type != "cpu":
        torch.cuda.synchronize()


def pages(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            yield "dropout", shape, dtype
        yield "LoRA", SHAPES[0], dtype


def timed_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Timed]:
    made = {way: layer_of(way) if name == "dropout" else adapted(way, shape[-1]) for way in WAYS}
    timed = {way: Timed(layer, shape, dtype) for way, layer in made.items()}
    for each in timed.values():
        for _ in range(3):  # compiled, and memory is there
            each.run()
    return timed


def peaks_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[float]:
    """The peak of each way, in sizes of the rows."""
    timed, size = timed_of(name, shape, dtype), torch.Size(shape).numel() * dtype.itemsize
    return [statistics.median(timed[way].peak() for _ in range(5)) / size for way in WAYS]


def compare(peaks: list[float], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    timed = timed_of(name, shape, dtype)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            seconds[way].append(timed[way].seconds())
    base = statistics.median(seconds["torch"])
    cells = [f"{base * 1e3:8.2f}"]
    for way in WAYS[1:]:
        ratios = sorted(mine / base for mine in seconds[way])
        low, high = ratios[len(ratios) // 4], ratios[-len(ratios) // 4]
        cells.append(f"{statistics.median(ratios):6.2f} ({low:.2f} {high:.2f})")
    cells += [f"{peak:6.2f}" for peak in peaks]
    what = f"{name}, {' x '.join(map(str, shape))}, {str(dtype).removeprefix('torch.')}"
    print(f"{what:<36}{'  '.join(cells)}", flush=True)


def main() -> None:
    print(
        f"torch {torch.__version__}, {platform.machine()}, {platform.system()}, {DEVICE.type}; "
        f"{torch.get_num_threads()} thread, {SHARE:g} dropped, {arguments.rounds} rounds; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
    )
    head = "torch, ms      sample / torch    compiled / torch    torch  sample  compiled"
    print(f"{'':<88}peak: sizes of the rows")
    print(f"{'':<36}{head}")
    # With it, memory that is freed is given back, and can be seen; glibc reads it at the start.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, *sys.argv, "--peaks"]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    for peaks, case in zip(json.loads(found.stdout), cases(), strict=True):
        compare(peaks, *case)
    print(f"\nload at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--peaks", action="store_true", help="print the peaks alone")
    arguments = parser.parse_args()
    DEVICE = torch.device(arguments.device)
    torch.set_num_threads(1)
    if arguments.peaks:
        print(json.dumps([peaks_of(*case) for case in cases()]))
    else:
        main()
