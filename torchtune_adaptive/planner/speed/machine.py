"""The machine around a GPU: its power, its links, the network and the size of a node; and what is assumed of
these where nobody tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, sqrt

from torchtune_adaptive.planner.speed.devices import PCIE, Speeds, with_power

NETWORK_SHARE = 0.9
"""Share of a network's bandwidth that a collective reaches (assumption)."""
LEAST_POWER = 0.3
"""Share of the data sheet's power below which the rule for less power is not believed."""
PCIE_LINKS = {f"pcie{generation}": generation for generation in PCIE}
NVLINK = "nvlink"


@dataclass(frozen=True)
class Machine:
    """What is told about a machine; None is what is usual for the GPU.

    ``speeds`` applies it to a GPU, and ``lines`` says in words what was assumed.
    """

    power: float | None = None
    """Watts of each GPU."""
    links: float | str | None = None
    """The links between the GPUs of a node: ``nvlink``, ``pcie4``, or the bus bandwidth in bytes/s."""
    network: float | None = None
    """Bytes/s that the network carries to or from a node, all of its cards together."""
    gpus_in_a_node: int | None = None

    @property
    def in_any_gpu(self) -> Machine:
        """The same without what belongs to the GPU and its board."""
        return replace(self, power=None, links=None)

    @property
    def changes_speeds(self) -> bool:
        return self != Machine()

    def speeds(self, gpu: Speeds) -> Speeds:
        """The speeds of a GPU in this machine.

        Raises:
            ValueError: it cannot be in such a machine; the message says why.
        """
        speeds = gpu
        if self.power is not None:
            share = min(1.0, self.power / gpu.power)
            if share < LEAST_POWER:
                least = ceil(LEAST_POWER * gpu.power)
                raise ValueError(
                    f"power: {self.power:g} W is too little for a {gpu.name} (data sheet: {gpu.power:g} W): "
                    f"what it computes with less than {least} W cannot be told"
                )
            speeds = replace(with_power(speeds, gpu.name, share), power=self.power)
        if isinstance(self.links, str):
            speeds = _with_links(speeds, self.links)
        elif self.links is not None:
            speeds = replace(speeds, links=self.links)
        per_node = self.gpus_in_a_node or speeds.gpus_in_a_node
        network = speeds.network
        if self.network is not None:
            network = NETWORK_SHARE * self.network / per_node
        return replace(speeds, gpus_in_a_node=per_node, network=network)

    def lines(self, gpu: Speeds, ranks: int) -> Iterator[str]:
        """What is assumed about the machine of a GPU, each with its source or reason."""
        speeds = self.speeds(gpu)
        yield f"power: {self._about_power(gpu)}"
        if ranks > 1:
            yield f"links: {speeds.links / 1e9:.3g} GB/s for each GPU of a node ({self._about_links(gpu)})"
        if ranks > speeds.gpus_in_a_node:
            per_node = speeds.gpus_in_a_node
            told = "" if self.gpus_in_a_node else ", an assumption (--nodes)"
            yield f"nodes: {ceil(ranks / per_node)} of {per_node} GPUs{told}"
            total = speeds.network * per_node / 1e9
            yield f"network: {total:.3g} GB/s for each node ({self._about_network(gpu)})"

    def _about_power(self, gpu: Speeds) -> str:
        if self.power is None:
            return f"{gpu.power:g} W (data sheet)"
        if self.power >= gpu.power:
            return f"{self.power:g} W, taken to be as fast as the {gpu.power:g} W of the data sheet"
        return (
            f"{self.power:g} of {gpu.power:g} W, so it computes {sqrt(self.power / gpu.power):.2f} times as "
            "fast (the square root, an assumption); memory and links are as fast"
        )

    def _about_links(self, gpu: Speeds) -> str:
        if self.links is None:
            usual = "NVLink or its like" if gpu.has_nvlink else "PCIe"
            return f"{usual}, as nccl-tests shows or as assumed for such GPUs"
        if self.links == NVLINK:
            return "NVLink, as nccl-tests shows or as assumed for such GPUs"
        if isinstance(self.links, str):
            generation = PCIE_LINKS[self.links]
            host = PCIE[generation][1] / 1e9
            return f"PCIe {generation}, an assumption, as are {host:.3g} GB/s to and from the host"
        return "as told: the bus bandwidth of nccl-tests"

    def _about_network(self, gpu: Speeds) -> str:
        if self.network is None:
            return f"{gpu.network / 1e9:.3g} for each GPU, an assumption (--network)"
        return f"{NETWORK_SHARE:g} of the {self.network / 1e9:.4g} GB/s that are told, an assumption"


def _with_links(speeds: Speeds, links: str) -> Speeds:
    if links != NVLINK:
        collective, host = PCIE[PCIE_LINKS[links]]
        return replace(speeds, links=collective, host=host, has_nvlink=False)
    if not speeds.has_nvlink:
        raise ValueError(
            f"links: NVLink between all GPUs of a node is not known for a {speeds.name}; give what nccl-tests "
            "shows, such as 50GB/s"
        )
    return speeds
