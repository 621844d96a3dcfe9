"""The meshes of a run: how its ranks share layers, rows, and parameters, and which have copies of them.

Ranks that split layers are next to each other; so are groups of them that have parts of the same rows, and so
on. torchtune's main branch has the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtune_adaptive.common import ConfigError, counted
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.keys import CONTEXT, COPIES, SHARDS, TENSORS
from torchtune_adaptive.recipe.setup.environment import Environment


def model_meshes(asked: Asked, environment: Environment) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh over which FSDP spreads the model, as copies of shards where that is asked for (HSDP), and the
    mesh over which tensors are split. Ranks with parts of the same rows have a shard each.

    Raises:
        ConfigError: the run has another number of ranks.
    """
    ranks, parts, tensors = environment.ranks.size, environment.parts, asked.holders
    copies, configured = asked[COPIES], asked[SHARDS]
    _require_divisors(ranks, {TENSORS: tensors, CONTEXT: parts, COPIES: copies})
    shards = ranks // (tensors * parts * copies)
    if configured not in (-1, shards):
        reason = f"does not fit {counted(ranks, 'rank')}, which leave {shards} for it"
        raise ConfigError(SHARDS, configured, reason, "Leave it out, or set it to -1")
    if copies > 1 and shards * parts == 1:
        reason = "leaves one rank for each copy, so that nothing is sharded"
        raise ConfigError(COPIES, copies, reason, "Lower it, or use more ranks")
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh(
        environment.device.type, (copies, shards * parts, tensors), mesh_dim_names=names
    )
    return mesh[names[:2]] if copies > 1 else mesh["dp_shard"], mesh["tp"]


def context_mesh(asked: Asked, environment: Environment) -> DeviceMesh:
    """The mesh of the ranks that have parts of the same rows as this one.

    Raises:
        ConfigError: the run has another number of ranks.
    """
    ranks, tensors, parts = environment.ranks.size, asked.holders, asked.contexts
    _require_divisors(ranks, {TENSORS: tensors, CONTEXT: parts})
    shape = (ranks // (tensors * parts), parts, tensors)
    mesh = init_device_mesh(environment.device.type, shape, mesh_dim_names=("dp", "cp", "tp"))
    return mesh["cp"]


def _require_divisors(ranks: int, numbers: Mapping[str, int]) -> None:
    """Raise ``ConfigError`` unless the ranks can be divided by the values of some keys, one after the other,
    naming the first by which they cannot."""
    before: dict[str, int] = {}
    left = ranks
    for key, number in numbers.items():
        if left % number:
            reason = f"does not divide the {counted(ranks, 'rank')} of this run"
            if before:
                reason += " by " + " and ".join(f"{name}, {n}" for name, n in before.items())
            raise ConfigError(key, number, reason, "Lower it, or use another number of ranks")
        left //= number
        if number > 1:
            before[key] = number
