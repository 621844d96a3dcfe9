"""The machine around a GPU: what is told about it, and what is assumed."""

from __future__ import annotations

from math import sqrt

import pytest

from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.planner.speed.devices import SPEEDS, Speeds
from torchtune_adaptive.planner.speed.machine import Machine

H100 = SPEEDS["h100-80gb"]


def in_machine(gpu: str = "h100", **told: object) -> Speeds:
    found = Machine(**told).speeds(gpu)  # type: ignore[arg-type]
    assert found is not None
    return found


def lines(machine: Machine, ranks: int, gpu: str = "h100-80gb") -> str:
    return "\n".join(machine.lines(gpu, ranks))


def test_every_gpu_has_a_power() -> None:
    assert all(one.power > 0 for one in SPEEDS.values())


def test_a_machine_of_which_nothing_is_told_is_as_usual() -> None:
    assert in_machine() == H100 and not Machine().is_told
    assert Machine().speeds("GPU with 80 GB") is None
    assert lines(Machine(), 1) == "power: 700 W (data sheet)"
    assert "links: 340 GB/s for each GPU (NVLink or its like, from nccl-tests" in lines(
        Machine(), 8
    )
    assert "links: 24 GB/s for each GPU (PCIe, an assumption)" in lines(Machine(), 8, "h100 pcie")
    assert "nodes:" not in lines(Machine(), 8)
    said = lines(Machine(), 16)
    assert "nodes: 2 of 8 GPUs, an assumption (--nodes)" in said
    assert "network: 360 GB/s for each node (45 GB/s for each GPU, an assumption" in said


def test_less_power_computes_less_and_moves_as_much() -> None:
    slower = in_machine(power=500.0)
    assert slower.gemm == pytest.approx(H100.gemm * sqrt(500 / 700))
    assert (slower.bandwidth, slower.links, slower.power) == (H100.bandwidth, H100.links, 500.0)
    assert "power: 500 W of 700 W: computes 0.85 as fast (by the square root" in lines(
        Machine(power=500.0), 1
    )


def test_more_power_than_the_data_sheets_gains_nothing() -> None:
    assert in_machine("4090", power=600.0).gemm == SPEEDS["rtx4090-24gb"].gemm
    said = lines(Machine(power=600.0), 1, "rtx4090-24gb")
    assert said == "power: 600 W, as fast as with the 450 W of the data sheet"


def test_links() -> None:
    slow = in_machine(links="pcie3")
    assert slow.links == SPEEDS["a6000-48gb"].links / 2 and slow.host < H100.host
    assert in_machine("4090", links="pcie3").links == slow.links  # through the host's memory
    assert in_machine(links=50e9).links == 50e9
    assert in_machine(links="nvlink") == H100
    assert "(PCIe 3, with 11 GB/s to the host; assumptions)" in lines(Machine(links="pcie3"), 2)
    assert "links: 50 GB/s for each GPU (told;" in lines(Machine(links=50e9), 2)


def test_a_network_is_shared_by_the_gpus_of_a_node() -> None:
    told = Machine(network=50e9, gpus_in_a_node=4)
    found = told.speeds("h100")
    assert found is not None
    assert found.collective_bandwidth(4) == H100.links
    assert found.collective_bandwidth(8) == pytest.approx(0.9 * 50e9)
    said = lines(told, 8)
    assert "nodes: 2 of 4 GPUs" in said and "assumption (--nodes)" not in said
    assert "network: 45 GB/s for each node (90% of the 50 GB/s told, an assumption)" in said


@pytest.mark.parametrize(
    ("gpu", "told", "complaint"),
    [
        ("a100-80", {"power": 100.0}, "power: '100W' is less than 30% of the 400 W of a100-80gb"),
        ("4090", {"links": "nvlink"}, "links: 'nvlink' between all GPUs of a node is not known"),
    ],
)
def test_what_cannot_be(gpu: str, told: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        in_machine(gpu, **told)
    assert complaint in str(refused.value)


def test_other_gpus_have_the_nodes_and_the_network() -> None:
    told = Machine(power=500.0, links="pcie4", network=50e9, gpus_in_a_node=4)
    assert told.for_other_gpus == Machine(network=50e9, gpus_in_a_node=4)
