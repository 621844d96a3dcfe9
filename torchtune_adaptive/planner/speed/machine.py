"""The machine around a GPU: its power, its links, the network and the size of a node; and what is assumed of
these where nobody tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import ClassVar

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.planner.speed.devices import PCIE, Speeds, with_power

NETWORK_SHARE = 0.9
"""Share of a network's bandwidth that a collective reaches (assumption)."""
LEAST_POWER = 0.3
"""Share of the data sheet's power below which the rule for less power is not believed."""
PCIE_LINKS = {f"pcie{generation}": generation for generation in PCIE}
NVLINK = "nvlink"


@dataclass(frozen=True)
class Machine:
    """What is told about the machine around GPUs, for the speed of a plan; None stands for what is usual with
    the GPU."""

    LINKS: ClassVar = (NVLINK, *PCIE_LINKS)
    """Links that have a name."""

    power: float | None = None
    """Watts of each GPU."""
    links: float | str | None = None
    """The links between the GPUs of a node: ``nvlink``, ``pcie3``, ``pcie4``, ``pcie5``, or the bus bandwidth
    in bytes/s, as nccl-tests prints it."""
    network: float | None = None
    """Bytes/s that the network carries to or from a node, all of its cards together."""
    gpus_in_a_node: int | None = None
    """The number of GPUs in a node."""

    @property
    def is_told(self) -> bool:
        """Whether anything is told."""
        return self != Machine()

    @property
    def for_other_gpus(self) -> Machine:
        """The same without what belongs to the GPU and its board."""
        return replace(self, power=None, links=None)

    @staticmethod
    def simulated() -> Speeds:
        """The speeds of the simulated device."""
        return Speeds.simulated()

    def speeds(self, device: str) -> Speeds | None:
        """The speeds of a GPU in this machine, by our name or torch's; None if they are not known.

        Raises:
            ConfigError: what is told cannot be with this GPU.
        """
        usual = Speeds.of(device)
        return self._applied_to(usual) if usual else None

    def lines(self, device: str, ranks: int) -> Iterator[str]:
        """What is assumed about the machine, each with its source or reason."""
        usual = Speeds.of(device)
        if usual is None:
            return
        speeds = self._applied_to(usual)
        per_node = speeds.gpus_in_a_node
        yield f"power: {self._about_power(usual)}"
        if ranks > 1:
            yield f"links: {speeds.links / 1e9:.3g} GB/s for each GPU ({self._about_links(usual)})"
        if ranks > per_node:
            told = "" if self.gpus_in_a_node else ", an assumption (--nodes)"
            yield f"nodes: {ceil(ranks / per_node)} of {per_node} GPUs{told}"
            carried = speeds.network * per_node / 1e9
            yield f"network: {carried:.3g} GB/s for each node ({self._about_network(usual)})"

    def _applied_to(self, usual: Speeds) -> Speeds:
        speeds = self._with_links(self._with_power(usual))
        per_node = self.gpus_in_a_node or usual.gpus_in_a_node
        speeds = replace(speeds, gpus_in_a_node=per_node)
        if self.network is not None:
            speeds = replace(speeds, network=NETWORK_SHARE * self.network / per_node)
        return speeds

    def _with_power(self, usual: Speeds) -> Speeds:
        if self.power is None:
            return usual
        share = min(1.0, self.power / usual.power)
        if share < LEAST_POWER:
            reason = f"is less than {LEAST_POWER:.0%} of the {usual.power:g} W of {usual.name}"
            remedy = "How fast it computes with so little is not known; give more, or leave it out"
            raise ConfigError("power", f"{self.power:g}W", reason, remedy)
        return replace(with_power(usual, usual.name, share), power=self.power)

    def _with_links(self, speeds: Speeds) -> Speeds:
        if self.links is None:
            return speeds
        if not isinstance(self.links, str):
            return replace(speeds, links=self.links)
        if self.links != NVLINK:
            links, host = PCIE[PCIE_LINKS[self.links]]
            return replace(speeds, links=links, host=host, has_nvlink=False)
        if not speeds.has_nvlink:
            reason = f"between all GPUs of a node is not known for {speeds.name}"
            remedy = "Give the bus bandwidth that nccl-tests shows, such as 50GB/s"
            raise ConfigError("links", NVLINK, reason, remedy)
        return speeds

    def _about_power(self, usual: Speeds) -> str:
        if self.power is None:
            return f"{usual.power:g} W (data sheet)"
        if self.power >= usual.power:
            return f"{self.power:g} W, as fast as with the {usual.power:g} W of the data sheet"
        faster = sqrt(self.power / usual.power)
        return (
            f"{self.power:g} W of {usual.power:g} W: computes {faster:.2f} as fast (by the square root, "
            "an assumption), moves data as fast"
        )

    def _about_links(self, usual: Speeds) -> str:
        if self.links is None or self.links == NVLINK:
            if not usual.has_nvlink:
                return "PCIe, an assumption"
            source = "an assumption" if usual.assumed else "from nccl-tests on 8 GPUs"
            return f"NVLink or its like, {source}"
        if isinstance(self.links, str):
            generation = PCIE_LINKS[self.links]
            host = PCIE[generation][1] / 1e9
            return f"PCIe {generation}, with {host:.3g} GB/s to the host; assumptions"
        return "told; what nccl-tests calls the bus bandwidth"

    def _about_network(self, usual: Speeds) -> str:
        if self.network is None:
            return f"{usual.network / 1e9:.3g} GB/s for each GPU, an assumption (--network)"
        return f"{NETWORK_SHARE:.0%} of the {self.network / 1e9:.4g} GB/s told, an assumption"
