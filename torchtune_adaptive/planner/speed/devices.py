"""The speeds of GPUs: what data sheets say, and which share of it the kernels of a training step reach.

Peaks and bandwidths are those of the makers' data sheets (dense, 32-bit accumulation). Shares are
measurements of single kernels and single collectives, with their sources below. No number is fitted to the
throughput of a training run, but for ``LAUNCH``, which follows from two runs that the host decides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import sqrt

from torchtune_adaptive.planner.gpu_names import read

STREAMING = 0.85
"""Share of the memory bandwidth that kernels reach which only move data; 0.80 to 0.90 is common for large
tensors."""

KERNEL = 2.5e-6
"""Seconds that the shortest kernel takes, start and end included."""

LAUNCH = 18e-6
"""Seconds in which the host launches an operation in eager mode, dispatcher and autograd included. Two
published runs of Qwen3-0.6B in transformers, which the host decides, took 18 and 19 us for each operation,
and those of another machine 23 to 26 us (``docs/results/published_4090.md``)."""

COMPILED_LAUNCH = 6e-6
"""The same in a compiled step, by code that needs neither dispatcher nor autograd (assumption)."""

REPEATING = 1e-3
"""Seconds of the host before a layer or a chunk of the loss is repeated: hooks pack and unpack all that it
had saved, and the random numbers of then are brought back. 1.0 to 1.7 ms (``docs/results/fastest.md``)."""

CHOOSING = 32e-6
"""Seconds of the host for each operation of a layer that is checkpointed by operation: in Python, in both
passes."""

FSDP_COLLECTIVE, FSDP_PARAMETER = 50, 3.5
"""Launches' worth of the host's time for each of FSDP's collectives, and for each parameter in it: its hooks,
in Python (``docs/results/fsdp_host.md``)."""

SYNCHRONIZE = 1e-6
"""Seconds in which the host records an event or makes a stream wait for one."""

CHANNELS, PCIE_CHANNELS = 24, 4
"""Multiprocessors that a collective occupies: NCCL's channels on 8 GPUs with NVSwitch, as its log shows
them; over PCIe an assumption."""

BEGINNING = 400.0
"""Keys' worth of time that each block of attention takes to begin, to fill its pipeline, and to compute what
a causal mask hides on its diagonal. In the figures of FlashAttention-2 (A100) and 3 (H100), rows of 2k reach
0.82 to 0.9 of what rows of 8k and 16k do, rows of 512 half."""

SOFTMAX = 16.0
"""Head dimensions' worth of time for the exponentials: a head dimension of 64 reaches 0.9 of what 128 does in
the same figures."""

COPY_LATENCY = 10e-6
"""Seconds that a copy to or from the host takes before it moves anything."""


@dataclass(frozen=True)
class Speeds:
    """The speeds of a device."""

    name: str
    """Name as in ``memory.gpus``."""
    half: float | None
    """FLOP/s of matrix products in bf16 and fp16; None if it has no bf16."""
    single: float
    """FLOP/s in fp32, without TF32."""
    bandwidth: float
    """Bytes/s of its memory."""
    processors: int
    """Streaming multiprocessors, over which the tiles of a matrix product are spread."""
    gemm: float
    """Share of the peak that large matrix products reach."""
    attention: tuple[float, float]
    """Share of the peak that causal flash attention reaches: forward, backward."""
    links: float
    """Bytes/s that a rank sends in a collective within a node (the bus bandwidth of nccl-tests)."""
    network: float
    """Bytes/s that a GPU's share of the network carries between nodes."""
    host: float
    """Bytes/s of pinned copies to or from the host."""
    cache: float = 0.0
    """Bytes of the cache that all multiprocessors share."""
    power: float = 0.0
    """Watts that the data sheet gives it; 0 if unknown."""
    has_nvlink: bool = False
    """Whether ``links`` are NVLink or Infinity Fabric; if not, PCIe."""
    gpus_in_a_node: int = 8
    launch: float = LAUNCH
    compiled_launch: float = COMPILED_LAUNCH
    kernel: float = KERNEL
    assumed: str = ""
    """Note on what no measurement is known for."""
    is_host: bool = False
    """Whether the host is the device, so that nothing is launched ahead."""

    def peak(self, dtype: str) -> float | None:
        return self.single if dtype in ("float32", "float64") else self.half

    def ranks_in_a_node(self, ranks: int, distance: int) -> int:
        """The number of a group's ranks that are in one node, if each is so far from the next."""
        return min(ranks, max(1, self.gpus_in_a_node // distance))

    def collective_bandwidth(self, ranks: int, distance: int = 1) -> float:
        """Bytes/s on the wire of each rank. Between nodes, the rings of a collective share the network with
        those of the node's other groups."""
        together = self.ranks_in_a_node(ranks, distance)
        return self.links if ranks <= together else min(self.links, together * self.network)

    @staticmethod
    def simulated() -> Speeds:
        """The speeds of the simulated device."""
        return SIMULATED

    @staticmethod
    def of(device: str) -> Speeds | None:
        """The speeds of a device by our name for it, or by torch's, like
        ``NVIDIA H100 80GB HBM3``; None if it is not known, or several are meant."""
        names = read(device, SPEEDS).names
        return SPEEDS[names[0]] if len(names) == 1 else None


def with_power(speeds: Speeds, name: str, share: float) -> Speeds:
    """The same chip with less power: what it computes falls with the square root. (An H100 PCIe has half the
    power of an H100 SXM for 0.86 of its processors, and reaches about 0.6 of its matrix products.)"""
    forward, backward = speeds.attention
    slower = sqrt(share)
    return replace(
        speeds,
        name=name,
        gemm=speeds.gemm * slower,
        attention=(forward * slower, backward * slower),
    )


_SHARES = "its shares of the peaks are assumptions"
_UNCERTAIN = f"{_SHARES}, and sources differ on its data sheet"


@dataclass(frozen=True)
class _Family:
    """The properties that GPUs which are built alike have in common."""

    gemm: float
    attention: tuple[float, float]
    links: float
    network: float
    host: float
    has_nvlink: bool = True
    assumed: str = _SHARES


PCIE = {3: (6e9, 11e9), 4: (12e9, 22e9), 5: (24e9, 44e9)}
"""Bytes/s by generation of PCIe: of a rank in a collective, and of a copy to or from the host. Those of
PCIe 4 are assumptions; each generation doubles what the one before it moves. GeForce cards, whose driver
allows no peer-to-peer, reach as much through the host's memory: nccl-tests' bus bandwidth was 12.4 and
15.3 GB/s on two machines with two RTX 4090 each (``docs/results/published_4090.md``)."""
_PCIE4, _PCIE5 = ((links, 6e9, host, False) for links, host in (PCIE[4], PCIE[5]))

# Matrix products. A100: 0.82; the best shape reaches 0.869 (ml-engineering, "Maximum Achievable Matmul
# FLOPS", torch 2.6), and large shapes about 5 % less. H100: 0.73, which is 720 of 989 TFLOP/s (SemiAnalysis,
# "MI300X vs H100 vs H200", December 2024). RTX 4090: 0.90, about 150 of 165 TFLOP/s (assumption). MI300X and
# MI250X: 0.95 of what ml-engineering gives for the best shape.
# H100 PCIe: 0.62; the best shape reaches 496 of 756 TFLOP/s (zzc0721/torch-performance-test-data, issue 95),
# and large shapes about 5 % less; H100 NVL is taken to reach as much, H200 NVL (600 W) as much as SXM.
# Attention. FlashAttention-2, head dimension 128, causal, very long rows (BEGINNING tells of shorter ones):
# on H100 346 TFLOP/s forward, which is 298 to 333 for rows of 2k to 8k (figures of the FlashAttention-3
# paper, arXiv 2407.08608), backward a tenth less; on A100 195 TFLOP/s in both passes, which is 162 to 190 for
# rows of 2k to 16k, where the figures of arXiv 2307.08691 go from about 155 to 189. RTX 4090:
# 0.92 and 0.75 (assumption).
# Collectives: the bus bandwidth of nccl-tests on 8 GPUs, about 230 GB/s on A100, 340 GB/s for an all-gather
# on H100; 12 GB/s over PCIe 4. Networks: one NIC of 200 Gb/s (A100) or 400 Gb/s (H100) for each
# GPU, 0.9 of it.
_A100 = _Family(0.82, (0.70, 0.60), 230e9, 22.5e9, 22e9, assumed="")
_A100_CARD = _Family(0.72, (0.62, 0.52), *_PCIE4)
_A800 = replace(_A100, links=230e9 * 400 / 600)  # NVLink of 400 GB/s instead of 600
_HOPPER = _Family(0.73, (0.35, 0.315), 340e9, 45e9, 50e9, assumed="")
_H800 = replace(_HOPPER, links=340e9 * 400 / 900)  # NVLink of 400 GB/s instead of 900
_H20 = replace(
    _HOPPER, gemm=0.90, attention=(0.82, 0.70), assumed=_SHARES
)  # little to compute with
_HOPPER_CARD = _Family(0.62, (0.30, 0.27), *_PCIE5)
_H200_CARD = replace(_HOPPER_CARD, gemm=0.73, attention=(0.35, 0.315))
_BLACKWELL = _Family(0.70, (0.28, 0.24), 680e9, 45e9, 50e9)
_NEWER_BLACKWELL = replace(_BLACKWELL, assumed=_UNCERTAIN)
_GEFORCE = _Family(0.90, (0.92, 0.75), *_PCIE4)
_OLD = _Family(0.70, (0.58, 0.47), *_PCIE4)
# Cards with less power for what they could compute.
_SERVER_CARD = _Family(0.60, (0.52, 0.44), *_PCIE4)
_A10G = replace(
    _SERVER_CARD, gemm=0.85, attention=(0.82, 0.70)
)  # twice the A10's power for half its peak
_MI200 = _Family(0.73, (0.40, 0.29), 100e9, 22.5e9, 22e9)
_MI300 = _Family(0.49, (0.29, 0.21), 310e9, 45e9, 50e9)

_T = 1e12
_DATA_SHEETS: dict[str, tuple[float | None, float, float, int, float, float, _Family]] = {
    # TFLOP/s in bf16 and fp32, TB/s, multiprocessors, watts, MB of the L2 cache (MI300 and later: of Infinity
    # Cache). MI250 and MI250X: one of the two devices that are on a card.
    "rtx2080ti-11gb": (None, 13.4, 0.616, 68, 250, 5.5, _OLD),
    "rtx3060-12gb": (25.5, 12.7, 0.360, 28, 170, 3, _GEFORCE),
    "rtx3070-8gb": (40.6, 20.3, 0.448, 46, 220, 4, _GEFORCE),
    "rtx3080-10gb": (59.5, 29.8, 0.760, 68, 320, 5, _GEFORCE),
    "rtx3090-24gb": (71.0, 35.6, 0.936, 82, 350, 6, _GEFORCE),
    "rtx3090ti-24gb": (80.0, 40.0, 1.008, 84, 450, 6, _GEFORCE),
    "rtx4070-12gb": (58.3, 29.1, 0.504, 46, 200, 36, _GEFORCE),
    "rtx4080-16gb": (97.5, 48.7, 0.717, 76, 320, 64, _GEFORCE),
    "rtx4090-24gb": (165.2, 82.6, 1.008, 128, 450, 72, _GEFORCE),
    "rtx5060ti-16gb": (47.4, 23.7, 0.448, 36, 180, 32, _GEFORCE),
    "rtx5070-12gb": (61.7, 30.9, 0.672, 48, 250, 48, _GEFORCE),
    "rtx5070ti-16gb": (87.9, 43.9, 0.896, 70, 300, 48, _GEFORCE),
    "rtx5080-16gb": (112.6, 56.3, 0.960, 84, 360, 64, _GEFORCE),
    "rtx5090-32gb": (209.5, 104.8, 1.792, 170, 575, 96, _GEFORCE),
    "rtx8000-48gb": (None, 16.3, 0.672, 72, 295, 6, _OLD),
    "a4000-16gb": (76.7, 19.2, 0.448, 48, 140, 4, _SERVER_CARD),
    "a5000-24gb": (111.1, 27.8, 0.768, 64, 230, 6, _SERVER_CARD),
    "a6000-48gb": (154.8, 38.7, 0.768, 84, 300, 6, _SERVER_CARD),
    "rtx5000ada-32gb": (261.1, 65.3, 0.576, 100, 250, 72, _SERVER_CARD),
    "rtx6000ada-48gb": (364.2, 91.1, 0.960, 142, 300, 96, _SERVER_CARD),
    "rtxpro6000-96gb": (503.8, 125.0, 1.792, 188, 600, 128, _SERVER_CARD),
    "t4-16gb": (None, 8.1, 0.320, 40, 70, 4, _OLD),
    "v100-16gb": (None, 15.7, 0.900, 80, 300, 6, _OLD),
    "v100-32gb": (None, 15.7, 0.900, 80, 300, 6, _OLD),
    "l4-24gb": (121.0, 30.3, 0.300, 58, 72, 48, _SERVER_CARD),
    "a10-24gb": (125.0, 31.2, 0.600, 72, 150, 6, _SERVER_CARD),
    "a10g-24gb": (70.0, 35.0, 0.600, 80, 300, 6, _A10G),
    "a30-24gb": (165.0, 10.3, 0.933, 56, 165, 24, _SERVER_CARD),
    "a40-48gb": (149.7, 37.4, 0.696, 84, 300, 6, _SERVER_CARD),
    "l40-48gb": (181.0, 90.5, 0.864, 142, 300, 96, _SERVER_CARD),
    "l40s-48gb": (362.0, 91.6, 0.864, 142, 350, 96, _SERVER_CARD),
    "a100-40gb": (312.0, 19.5, 1.555, 108, 400, 40, _A100),
    "a100-80gb": (312.0, 19.5, 2.039, 108, 400, 40, _A100),
    "a100pcie-40gb": (312.0, 19.5, 1.555, 108, 250, 40, _A100_CARD),
    "a100pcie-80gb": (312.0, 19.5, 1.935, 108, 300, 40, _A100_CARD),
    "a800-80gb": (312.0, 19.5, 2.039, 108, 400, 40, _A800),
    "h100-80gb": (989.0, 67.0, 3.35, 132, 700, 50, _HOPPER),
    "h100pcie-80gb": (756.0, 51.0, 2.0, 114, 350, 50, _HOPPER_CARD),
    "h100nvl-94gb": (835.0, 60.0, 3.9, 132, 400, 50, _HOPPER_CARD),
    "h800-80gb": (989.0, 67.0, 3.35, 132, 700, 50, _H800),
    "h20-96gb": (148.0, 44.0, 4.0, 78, 400, 60, _H20),
    "gh200-96gb": (989.0, 67.0, 4.0, 132, 700, 50, _HOPPER),
    "gh200-144gb": (989.0, 67.0, 4.9, 132, 700, 50, _HOPPER),
    "h200-141gb": (989.0, 67.0, 4.8, 132, 700, 50, _HOPPER),
    "h200nvl-141gb": (835.0, 60.0, 4.8, 132, 600, 50, _H200_CARD),
    "b200-192gb": (2250.0, 75.0, 7.7, 148, 1000, 126, _BLACKWELL),
    "gb200-186gb": (2500.0, 80.0, 8.0, 148, 1200, 126, _NEWER_BLACKWELL),
    "b300-288gb": (2250.0, 75.0, 8.0, 148, 1100, 126, _NEWER_BLACKWELL),
    "rx7900xtx-24gb": (122.8, 61.4, 0.960, 96, 355, 6, _SERVER_CARD),
    "mi210-64gb": (181.0, 22.6, 1.6, 104, 300, 8, _MI200),
    "mi250x-64gb": (191.5, 23.9, 1.6, 110, 280, 8, _MI200),
    "mi250-64gb": (181.0, 22.6, 1.6, 104, 280, 8, _MI200),
    "mi300x-192gb": (1307.0, 163.4, 5.3, 304, 750, 256, _MI300),
    "mi325x-256gb": (1307.0, 163.4, 6.0, 304, 1000, 256, _MI300),
    "mi350x-288gb": (2307.0, 144.2, 8.0, 256, 1000, 256, _MI300),
    "mi355x-288gb": (2517.0, 157.3, 8.0, 256, 1400, 256, _MI300),
}

SPEEDS = {
    name: Speeds(
        *(name, half and half * _T, single * _T, bandwidth * _T, processors),
        power=power,
        cache=cache * 1e6,
        **{field.name: getattr(family, field.name) for field in fields(family)},
    )
    for name, (half, single, bandwidth, processors, power, cache, family) in _DATA_SHEETS.items()
}

SIMULATED = Speeds(
    *("simulated device", 1e11, 1e11, 2e10, 1, 1.0, (0.8, 0.8)),
    links=2e9,
    network=1e9,
    host=4e10,
    launch=9e-6,
    compiled_launch=9e-6,
    kernel=0.0,
    is_host=True,
    assumed="the speed is that of one nominal CPU core (100 GFLOP/s, 20 GB/s)",
)
