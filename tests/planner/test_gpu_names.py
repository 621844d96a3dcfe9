"""Names of GPUs, as users write them and as torch prints them."""

from __future__ import annotations

import pytest

from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.planner.memory.gpus import GPUS, gpu
from torchtune_adaptive.planner.speed.devices import Speeds


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100pcie-40gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100pcie-80gb"),
        ("NVIDIA H100 NVL", "h100nvl-94gb"),
        ("NVIDIA H800", "h800-80gb"),
        ("NVIDIA H20", "h20-96gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA H200 NVL", "h200nvl-141gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("NVIDIA B200", "b200-192gb"),
        ("NVIDIA GB200", "gb200-186gb"),
        ("NVIDIA B300 SXM6 AC", "b300-288gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx5070ti-16gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada-48gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000-96gb"),
        ("NVIDIA RTX A6000", "a6000-48gb"),
        ("Quadro RTX 8000", "rtx8000-48gb"),
        ("NVIDIA A10", "a10-24gb"),
        ("NVIDIA A10G", "a10g-24gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40", "l40-48gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("Tesla T4", "t4-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-PCIE-16GB", "v100-16gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("AMD Instinct MI250X / MI250", "mi250x-64gb"),
        ("AMD Instinct MI355X", "mi355x-288gb"),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx-24gb"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_torch_prints(name: str, expected: str) -> None:
    found = Speeds.of(name)
    assert gpu(name).name == expected and found is not None and found.name == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[
            (name, "rtx4090-24gb")
            for name in ("4090", "rtx 4090", "RTX-4090", "rtx4090", "4090-24")
        ],
        *[(name, "h100-80gb") for name in ("h100", "H100-80GB", "h100-80", "h100sxm", "80GB H100")],
        ("a100 40", "a100-40gb"),
        ("h20", "h20-96gb"),
        ("l40", "l40-48gb"),
        ("a10", "a10-24gb"),
        ("h100-pcie", "h100pcie-80gb"),
    ],
)
def test_a_gpu_is_known_by_what_users_write(name: str, expected: str) -> None:
    assert gpu(name).name == expected


def test_each_of_our_names_means_itself() -> None:
    assert len(GPUS) >= 48
    assert [gpu(name).name for name in GPUS] == [*GPUS]
    models = [name.partition("-")[0] for name in GPUS]
    for name, model in zip(GPUS, models, strict=True):
        if models.count(model) == 1:
            assert gpu(model).name == name


@pytest.mark.parametrize(
    "name",
    [
        *("h10", "a1", "l", "mi300", "rtx", "", "-", "h101", "l20", "3080 ti", "rtx 6000"),
        *("4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "A100-SXM4-40GB MIG 1g.5gb", "a40-48q"),
        *("GPU with 80 GB", "GPU with 22.35 GiB", "Ascend 910B"),
    ],
)
def test_what_is_not_known_is_not_guessed(name: str) -> None:
    assert Speeds.of(name) is None
    with pytest.raises(ConfigError, match="is not a known GPU") as refused:
        gpu(name)
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("a100", "is ambiguous. Use one of a100-40gb, a100-80gb."),
        ("a100 pcie", "is ambiguous. Use one of a100pcie-40gb, a100pcie-80gb."),
        ("h100-8", "gives 8 GB, with which that model is not sold. Use h100-80gb or h100pcie-80gb"),
        ("NVIDIA A100-SXM-64GB", "gives 64 GB, with which that model is not sold"),
        ("2x4090", "is several GPUs"),
        ("gefroce 4090", "Did you mean rtx4090-24gb?"),
        ("telsa v100", "Did you mean v100-16gb or v100-32gb?"),
    ],
)
def test_why_a_name_is_refused(name: str, complaint: str) -> None:
    assert Speeds.of(name) is None
    with pytest.raises(ConfigError) as refused:
        gpu(name)
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


def test_a_card_is_not_its_neighbour() -> None:
    a10, a10g = Speeds.of("a10"), Speeds.of("a10g")
    assert a10 and a10g and (a10.half, a10g.half) == (125e12, 70e12)
    sxm, pcie = Speeds.of("h100"), Speeds.of("h100 pcie")
    assert sxm and pcie and sxm.links > 10 * pcie.links and pcie.bandwidth == 2e12
