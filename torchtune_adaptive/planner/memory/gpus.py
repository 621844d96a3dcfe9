"""GPUs that a run may be planned for, and how much of their memory a process can get.

Three words for amounts of memory, here and in what ``plan`` prints:

- *total*: what torch calls the device's total memory; less than the name of the card says.
- *capacity*: what one process can get of it: less by what the CUDA context and NCCL take.
- *usable memory*: capacity - headroom (``adaptive_batching.headroom``). A size fits if its peak is within it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.planner.gpu_names import read, respelled

GIB, MIB = 1 << 30, 1 << 20

CONTEXT = GIB // 2
"""Assumption: a CUDA context with the kernels of a training step loaded."""

COMMUNICATION = GIB
"""Assumption: NCCL's buffers. Published for one node: 0.5 GiB (4 x A100) to 1.06 GB (8 x H100)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU model."""

    name: str
    gib: float
    """GiB in total."""
    workspace: int
    """Bytes that cuBLAS allocates for each stream and thread that uses it: 4096 KiB x 2 + 16 KiB x 8, and
    32 MiB from Hopper on. For AMD's libraries the larger one is assumed."""
    source: str
    """Report of torch's out-of-memory error on such a card, which shows the total; or the vendor's page,
    which does not."""

    @property
    def is_reported(self) -> bool:
        """Whether the source shows the total; if not, it is an estimate."""
        return self.source.startswith(_THREADS)

    @property
    def before_ampere(self) -> bool:
        """Whether it is a GPU of NVIDIA's that is older than Ampere."""
        return self.name in _BEFORE_AMPERE

    @property
    def capability(self) -> tuple[int, int]:
        """The CUDA capability, as torch gives it; that of an A100 for AMD's."""
        named = (
            found for found, beginnings in _CAPABILITIES.items() if self.name.startswith(beginnings)
        )
        return next(named, (8, 0))

    @property
    def total(self) -> int:
        return int(self.gib * GIB)

    def capacity(self, ranks: int) -> int:
        """Bytes that the allocator of one process can get in a run on ``ranks`` ranks."""
        return self.total - CONTEXT - (COMMUNICATION if ranks > 1 else 0)


_THREADS = "https://github.com/"
_SMALL, _LARGE = 8 * MIB + 128 * 1024, 32 * MIB


def _report(thread: str) -> str:
    return f"{_THREADS}{thread}"


def _nvidia(page: str) -> str:
    return f"https://www.nvidia.com/en-us/{page}/"


def _amd(page: str) -> str:
    return f"https://www.amd.com/en/products/{page}.html"


# Totals as torch reports them in out-of-memory errors: less than the name says, because the driver keeps
# some and, with ECC, a sixteenth of GDDR is lost. They differ by up to 0.2 GiB with the driver and the form
# factor of the card, so a smaller one may be found in other reports; --memory gives the exact amount. Each
# linked report was looked up: it names the card and shows the number. Where the vendor's page is linked, no
# such report was found. Of these, logs in public repositories show the numbers of A10G, L4, H200, B200 and
# MI300X; the others are those of a card with the same chip or memory, or less than that by as much as such
# cards keep, or, for AMD's, all but a few MiB.
_FACTS = {
    "rtx2080ti-11gb": (10.76, _SMALL, _report("ispc-lab/TMA/issues/5")),
    "rtx3060-12gb": (11.76, _SMALL, _report("TencentARC/PhotoMaker/issues/47")),
    "rtx3070-8gb": (7.78, _SMALL, _report("akshitac8/OW-DETR/issues/46")),
    "rtx3080-10gb": (9.78, _SMALL, _report("zai-org/CogVideo/issues/34")),
    "rtx3090-24gb": (23.70, _SMALL, _report("GaoLii/DSP/issues/10")),
    "rtx3090ti-24gb": (23.68, _SMALL, _nvidia("geforce/graphics-cards/30-series/rtx-3090-3090ti")),
    "rtx4070-12gb": (11.72, _SMALL, _nvidia("geforce/graphics-cards/40-series/rtx-4070-family")),
    "rtx4080-16gb": (15.70, _SMALL, _nvidia("geforce/graphics-cards/40-series/rtx-4080-family")),
    "rtx4090-24gb": (23.52, _SMALL, _report("sgl-project/sglang/issues/12496")),
    "rtx5060ti-16gb": (15.48, _LARGE, _nvidia("geforce/graphics-cards/50-series/rtx-5060-family")),
    "rtx5070-12gb": (11.50, _LARGE, _nvidia("geforce/graphics-cards/50-series/rtx-5070-family")),
    "rtx5070ti-16gb": (15.46, _LARGE, _nvidia("geforce/graphics-cards/50-series/rtx-5070-family")),
    "rtx5080-16gb": (15.46, _LARGE, _nvidia("geforce/graphics-cards/50-series/rtx-5080")),
    "rtx5090-32gb": (31.36, _LARGE, _report("TrajectoryCrafter/TrajectoryCrafter/issues/20")),
    "rtx8000-48gb": (47.46, _SMALL, _report("Victarry/stable-dreambooth/issues/8")),
    "a4000-16gb": (15.61, _SMALL, _report("DengKaiCQ/VGGT-Long/issues/6")),
    "a5000-24gb": (23.67, _SMALL, _report("Magicboomliu/Accelerator-Simple-Template/issues/7")),
    "a6000-48gb": (47.46, _SMALL, _nvidia("design-visualization/rtx-a6000")),
    "rtx5000ada-32gb": (31.45, _SMALL, _nvidia("products/workstations/rtx-5000")),
    "rtx6000ada-48gb": (44.43, _SMALL, _report("DINGYANB/MTVCrafter/issues/21")),
    "rtxpro6000-96gb": (94.97, _LARGE, _report("antirez/ds4/issues/431")),
    "t4-16gb": (14.56, _SMALL, _report("Zheng-Chong/CatVTON/issues/133")),
    "v100-16gb": (15.78, _SMALL, _report("kchengiva/Shift-GCN/issues/34")),
    "v100-32gb": (31.74, _SMALL, _report("liucongg/ChatGLM-Finetuning/issues/73")),
    "l4-24gb": (22.03, _SMALL, _nvidia("data-center/l4")),
    "a10-24gb": (21.99, _SMALL, _nvidia("data-center/products/a10-gpu")),
    "a10g-24gb": (22.06, _SMALL, "https://aws.amazon.com/ec2/instance-types/g5/"),
    "a30-24gb": (23.53, _SMALL, _report("google/RB-Modulation/issues/5")),
    "a40-48gb": (44.40, _SMALL, _nvidia("data-center/a40")),
    "l40-48gb": (44.40, _SMALL, _report("QwenLM/Qwen3-VL/issues/2097")),
    "l40s-48gb": (44.40, _SMALL, _report("vllm-project/vllm/issues/23230")),
    "a100-40gb": (39.50, _SMALL, _report("TianheWu/CoSeR/issues/10")),
    "a100-80gb": (79.14, _SMALL, _report("lianqi1008/Control-GIC/issues/6")),
    "a100pcie-40gb": (39.39, _SMALL, _nvidia("data-center/a100")),
    "a100pcie-80gb": (79.14, _SMALL, _nvidia("data-center/a100")),
    "a800-80gb": (79.33, _SMALL, _report("hahnyuan/PB-LLM/issues/3")),
    "h100-80gb": (79.11, _LARGE, _report("vllm-project/vllm/issues/27508")),
    "h100pcie-80gb": (79.11, _LARGE, _nvidia("data-center/h100")),
    "h100nvl-94gb": (93.00, _LARGE, _report("ali-vilab/VACE/issues/56")),
    "h800-80gb": (79.11, _LARGE, _nvidia("data-center/h100")),
    "h20-96gb": (95.00, _LARGE, "https://willitrunai.com/es/gpus/h20-96gb"),
    "gh200-96gb": (94.50, _LARGE, _nvidia("data-center/grace-hopper-superchip")),
    "gh200-144gb": (142.50, _LARGE, _nvidia("data-center/grace-hopper-superchip")),
    "h200-141gb": (139.80, _LARGE, _nvidia("data-center/h200")),
    "h200nvl-141gb": (139.80, _LARGE, _nvidia("data-center/h200")),
    "b200-192gb": (178.35, _LARGE, _nvidia("data-center/dgx-b200")),
    "gb200-186gb": (184.00, _LARGE, _nvidia("data-center/gb200-nvl72")),
    "b300-288gb": (267.50, _LARGE, _nvidia("data-center/hgx")),
    "rx7900xtx-24gb": (
        23.98,
        _LARGE,
        _amd("graphics/desktops/radeon/7000-series/amd-radeon-rx-7900xtx"),
    ),
    "mi210-64gb": (63.98, _LARGE, _amd("accelerators/instinct/mi200/mi210")),
    # Two devices to torch, each with half of the card's memory.
    "mi250x-64gb": (63.98, _LARGE, _amd("accelerators/instinct/mi200/mi250x")),
    "mi250-64gb": (63.98, _LARGE, _amd("accelerators/instinct/mi200/mi250")),
    "mi300x-192gb": (191.69, _LARGE, _amd("accelerators/instinct/mi300/mi300x")),
    "mi325x-256gb": (255.69, _LARGE, _amd("accelerators/instinct/mi300/mi325x")),
    "mi350x-288gb": (287.69, _LARGE, _amd("accelerators/instinct/mi350/mi350x")),
    "mi355x-288gb": (287.69, _LARGE, _amd("accelerators/instinct/mi350/mi355x")),
}
"""GiB in total, bytes of a workspace, and source, by name."""
_CAPABILITIES = {
    (7, 0): ("v100",),
    (7, 5): ("rtx2080", "rtx8000", "t4"),
    (8, 6): ("rtx30", "a4000", "a5000", "a6000", "a10-", "a10g", "a40-"),
    (8, 9): ("rtx40", "rtx5000ada", "rtx6000ada", "l4"),
    (9, 0): ("h100", "h800", "h20", "gh200"),
    (10, 0): ("b200", "gb200"),
    (10, 3): ("b300",),
    (12, 0): ("rtx50", "rtxpro"),
}
"""CUDA capabilities, by beginnings of names; all others have (8, 0)."""
_BEFORE_AMPERE = ("rtx2080ti-11gb", "rtx8000-48gb", "t4-16gb", "v100-16gb", "v100-32gb")
GPUS = {name: Gpu(name, *facts) for name, facts in _FACTS.items()}
DEFAULT = "h100-80gb"
HERE = "here"
"""Word instead of a GPU's name for the one of this machine, as measured by an earlier search."""


def gpu(name: str, option: str = "--gpu", memory: str = "--memory") -> Gpu:
    """The GPU of a name: ours, torch's, or the model alone where that is sold with one amount of memory. In
    messages, ``option`` stands for the name, and ``memory`` for what gives an amount of memory instead.

    Raises:
        ConfigError: it is not known, or several are meant.
    """
    meant = read(name, GPUS)
    if len(meant.names) == 1:
        return GPUS[meant.names[0]]
    if meant.names:
        raise ConfigError(option, name, "is ambiguous", f"Use one of {', '.join(meant.names)}")
    if re.match(r"\d+ *x", name):
        raise ConfigError(option, name, "is several GPUs", "Name one, and give their number apart")
    otherwise = f"give the capacity of one process with {memory}"
    if meant.same_model:
        forms = [meant.same_model[0].partition("-")[0] + form for form in ("", "pcie", "nvl")]
        sold = [one for one in GPUS if one.partition("-")[0] in forms]
        reason = f"gives {meant.size} GB, with which that model is not sold"
        raise ConfigError(option, name, reason, f"Use {' or '.join(sold)}, or {otherwise}")
    close = f"Did you mean {' or '.join(found)}? " if (found := respelled(name, GPUS)) else ""
    remedy = f"{close}`tune-adaptive plan --list-gpus` shows those that are; or {otherwise}"
    raise ConfigError(option, name, "is not a known GPU", remedy)


def known(name: str) -> str | None:
    """Our name for a GPU that torch names so, of any size where the size is missing; None if it is not
    known."""
    return next(iter(read(name, GPUS).names), None)


def is_before_ampere(name: str) -> bool:
    """Whether a GPU, named by us or by torch, is older than Ampere; not if it is not known."""
    return (ours := known(name)) is not None and GPUS[ours].before_ampere


def is_same(name: str, other: str) -> bool:
    """Whether two names mean the same GPU. What is not known is only the same as itself."""
    return (read(name, GPUS).names or name) == (read(other, GPUS).names or other)


def sold_as(memory: int) -> Gpu | None:
    """A GPU whose name promises exactly so many GB or GiB, if there is one."""
    for unit in (GIB, 10**9):
        if memory % unit == 0:
            promised = f"-{memory // unit}gb"
            return next((one for one in GPUS.values() if one.name.endswith(promised)), None)
    return None
