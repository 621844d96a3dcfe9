"""What ``plan`` is told about the machine: as options, or as a YAML file with the same words."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtune_adaptive.common import ConfigError, load_yaml
from torchtune_adaptive.planner import Machine

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, for ``machine_told``."""
    add = parser.add_argument
    nodes_help = (
        "nodes and GPUs in each, e.g. 2x8, which is also the number of GPUs (default: nodes of 8)"
    )
    add("--nodes", metavar="NxM", help=nodes_help)
    add(
        "--power",
        metavar="W",
        help="power limit of each GPU, e.g. 500W (default: the data sheet's)",
    )
    links_help = (
        f"links between the GPUs of a node: {', '.join(Machine.LINKS)}, or the bus bandwidth of "
        "nccl-tests, e.g. 300GB/s (default: as is usual for the GPU)"
    )
    add("--links", metavar="LINKS", help=links_help)
    network_help = (
        "what the network carries to or from a node in one direction, all its cards together, e.g. "
        "8x400Gb/s or 50GB/s"
    )
    add("--network", metavar="SPEED", help=network_help)
    file_help = (
        f"YAML file that tells the same, with the keys {', '.join(_READERS)}; options go before it"
    )
    add("--machine", type=Path, metavar="FILE", help=file_help)


def machine_told(
    arguments: argparse.Namespace,
) -> tuple[str | None, tuple[int, int] | None, Machine]:
    """The GPU's name, the numbers of nodes and of GPUs in each, and the machine: what the options tell, and
    the file where they do not.

    Raises:
        ConfigError: it cannot be read.
    """
    told: dict[str, Any] = _file(arguments.machine) if arguments.machine else {}
    given = {key: getattr(arguments, key) for key in _READERS}
    told |= {key: value for key, value in given.items() if value is not None}
    found = {key: read(told[key]) for key, read in _READERS.items() if key in told}
    gpu, nodes = found.pop("gpu", None), found.pop("nodes", None)
    return gpu, nodes, Machine(**found, gpus_in_a_node=nodes[1] if nodes else None)


def _file(path: Path) -> dict[str, Any]:
    found = load_yaml("--machine", path)
    wrong = sorted(map(str, set(found) - set(_READERS))) if isinstance(found, dict) else ["no keys"]
    if wrong:
        reason = f"has {', '.join(wrong)}"
        raise ConfigError("--machine", str(path), reason, f"Its keys are {', '.join(_READERS)}")
    return {key: value for key, value in found.items() if value is not None}


def _nodes(value: object) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*) *x *([1-9]\d*)", str(value))
    if not found:
        remedy = "Write the number of nodes and of GPUs in each, e.g. 2x8"
        raise ConfigError("nodes", value, "is not understood", remedy)
    return int(found[1]), int(found[2])


def _power(value: object) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *W?", str(value), re.IGNORECASE)
    if not found or not float(found[1]):
        raise ConfigError("power", value, "is not a power", "Write the watts of a GPU, e.g. 500W")
    return float(found[1])


def _links(value: object) -> float | str:
    if (word := str(value).lower()) in Machine.LINKS:
        return word
    return bandwidth("links", value, f"one of {', '.join(Machine.LINKS)}, or ")


def bandwidth(key: str, value: object, otherwise: str = "") -> float:
    """The bytes/s of ``200Gb/s`` (bits), ``25GB/s`` (bytes) or ``8x400Gb/s``; ``otherwise`` is what else the
    value may be, for the message."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(
        rf"(?:(\d+) *x *)?{number} *([KMGTkmgt]?)(b|B|bit|bits)(?:/s|ps)", str(value)
    )
    speed = 0.0
    if found:
        times, amount, prefix, unit = int(found[1] or 1), float(found[2]), found[3], found[4]
        speed = times * amount * _PREFIXES[prefix.upper()] / (1 if unit == "B" else 8)
    if not speed:
        remedy = f"Write {otherwise}a bandwidth: 200Gb/s in bits, 25GB/s in bytes, or 8x400Gb/s"
        raise ConfigError(key, value, "is not a bandwidth", remedy)
    return speed


_READERS: dict[str, Callable[[object], Any]] = {
    "gpu": str,
    "nodes": _nodes,
    "power": _power,
    "links": _links,
    "network": lambda value: bandwidth("network", value),
}
"""What is told, by its key in a file, and what reads it."""
