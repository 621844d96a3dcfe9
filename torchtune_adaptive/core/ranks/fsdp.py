"""FSDP2 beyond training: to see its collectives, and to reset it after an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.core import private

# torch 2.13 renamed both; the old names warn from there on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Watcher = Callable[..., Any]
"""Function called with the call that launches a collective, and with what FSDP calls right after it, if
anything. Must make the first, and return what that returns."""

Reducing = Callable[[torch.Tensor], None]
"""Function called with this rank's own gradients, before they are reduced over all ranks."""


def watch_collectives(model: nn.Module, watcher: Watcher, reducing: Reducing | None = None) -> None:
    """Route every all-gather and reduce-scatter of an FSDP2 model through ``watcher``.

    ``reducing`` sees what is about to be reduced, on the stream that will do it. On one rank there is
    nothing to reduce, so FSDP launches no collective, and ``reducing`` is not called.
    """
    for module in _sharded(model):
        reduce_scatter = _ReduceScatter(watcher, reducing, module)
        module.set_custom_all_gather(_AllGather(watcher))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]


def spread(model: nn.Module) -> private.Spread | None:
    """The ranks over which FSDP averages the gradients of a model, apart from its experts."""
    return max(_spreads(model), key=lambda each: each.size, default=None)


def _spreads(model: nn.Module) -> Iterator[private.Spread]:
    return filter(None, map(private.spread_by, _sharded(model)))


def has_experts(model: nn.Module) -> bool:
    """Whether FSDP averages gradients of some modules over fewer ranks: they get rows of other ranks, too."""
    return len({each.size for each in _spreads(model)}) > 1


def replicas(model: nn.Module) -> set[dist.ProcessGroup]:
    """The groups of ranks that hold the same shard, with HSDP, over which FSDP all-reduces gradients."""
    return {each.replicas for each in _spreads(model) if each.replicas is not None}


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules that ``fully_shard`` was applied to."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def roots(model: nn.Module) -> list[FSDPModule]:
    """The outermost modules that ``fully_shard`` was applied to, in a model that may be wrapped in others."""
    if isinstance(model, FSDPModule):
        return [model]
    return [root for child in model.children() for root in roots(child)]


class _Watched:
    """Base of FSDP2's two interfaces for custom collectives."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def allocate(
        self, size: Any, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:  # the signature that FSDP calls
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Watched):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):  # type: ignore[no-untyped-def]
        return self._watcher(
            partial(_all_gather, output_tensor, input_tensor, group=group, async_op=async_op)
        )


class _ReduceScatter(_Watched):
    """Watches a reduce-scatter, and with HSDP the all-reduce that FSDP launches right after it.

    There is no interface for that all-reduce. But its reduction is of the same kind, or a sum where the
    caller has set what gradients are divided by: FSDP then divides in the reduce-scatter alone. Between the
    two, it waits for no other rank (checked on torch 2.13).
    """

    def __init__(self, watcher: Watcher, reducing: Reducing | None, module: FSDPModule) -> None:
        super().__init__(watcher)
        self._reducing = reducing
        self._module = module
        about = private.spread_by(module)
        self._replicas = about.replicas if about else None

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):  # type: ignore[no-untyped-def]
        # Before the watcher hears of the collective: where this runs out of memory, it is not launched.
        if self._reducing is not None:
            self._reducing(input_tensor)
        then = []
        if self._replicas is not None:
            whole = dist.ReduceOp.SUM if any(private.divide_factors(self._module)) else op
            then = [partial(dist.all_reduce, output_tensor, op=whole, group=self._replicas)]
        return self._watcher(
            partial(
                _reduce_scatter, output_tensor, input_tensor, op=op, group=group, async_op=async_op
            ),
            *then,
        )


def reset(model: nn.Module) -> None:
    """Reset an FSDP2 model to the start of a step, after an exception in forward or backward.

    Afterward every parameter is sharded and no parameter has a gradient. Without this the next backward
    silently trains only part of the model. Gradients of unsharded parameters, which backward has left there
    or which wait for the last micro-batch, are dropped as well: FSDP2's own reset leaves them (torch 2.13),
    and the next step would count them twice.

    Whether a parameter is trained stays as the model shows it now. A forward pass that freezes parameters for
    a while, as PEFT does with adapters, thaws the unsharded ones when an exception ends it.
    """
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for root in roots(model):
        if private.has_run(root):
            private.drop_unsharded_gradients(root)
            private.reset_iter_state(root)
            private.free_gathered(root)
        _check_sharded(root)
    _drop_gradients(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without gradients has gathered and FSDP keeps for its backward."""
    for module in _sharded(model):
        module.reshard()


@contextmanager
def kept_gathered(model: nn.Module) -> Iterator[Callable[[], None]]:
    """A context in which parameters stay gathered after a forward pass; gives what gathers them first.

    Afterward they are still gathered: ``reset`` shards them.
    """
    for root in roots(model):
        private.begin(root)  # or there would be nothing to reset
    modules = [*_sharded(model)]

    def gather() -> None:
        for module in modules:
            module.unshard()

    before = [(module, private.resharding(module)) for module in modules]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield gather
    finally:
        for module, resharding in before:
            private.set_resharding(module, resharding)


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _check_sharded(root: FSDPModule) -> None:
    sharded = _sharded(root)  # type: ignore[arg-type]
    unsharded = [name for module in sharded for name in private.left_unsharded(module)]
    if unsharded:
        raise RuntimeError(
            f"FSDP2 of torch {torch.__version__} could not be reset after running out of memory: "
            f"{unsharded[0]} (and {len(unsharded) - 1} more) stayed unsharded. Please report this, and set "
            "adaptive_batching.on_out_of_memory=raise to train without recovery."
        )


def divisor(model: nn.Module) -> float | None:
    """The number that the sum of the gradients of all ranks is divided by; None without FSDP.

    It is the number of ranks over which FSDP shards, or what has been set instead. Experts that are spread
    over fewer ranks get the rows of all, so they are in order if they are divided by the same.

    Raises:
        UsageError: it is not the same in all modules, so there is no one gradient to scale.
    """
    found = {
        factor or about.size
        for module in _sharded(model)
        if (about := private.spread_by(module))
        for factor in private.divide_factors(module)
    }
    if len(found) > 1:
        raise UsageError(
            f"model: gradients are divided by {' and '.join(map(str, sorted(found)))} in modules: by the "
            "ranks of fully_shard's mesh, or by what set_gradient_divide_factor has set. Set the same value "
            "in every module that fully_shard was applied to."
        )
    return found.pop() if found else None


def changed_reduction(model: nn.Module) -> str | None:
    """A method of FSDP2 that has changed how gradients are reduced, if any has."""
    return next(
        (name for module in _sharded(model) for name in private.reduction_changes(module)), None
    )


def changed_communication(model: nn.Module) -> str | None:
    """A method of FSDP2 that has changed what launches collectives or allocates for them, if any has."""
    for module in _sharded(model):
        for all_gather, reduce_scatter in private.communications(module):
            gathers = _set_by(all_gather, "set_custom_all_gather")
            if called := gathers or _set_by(reduce_scatter, "set_custom_reduce_scatter"):
                return called
    return None


def _set_by(communication: object, custom: str) -> str | None:
    """The method that has set what launches a collective; None if it is FSDP's own or that of a step."""
    kind = type(communication)
    if isinstance(communication, _Watched):
        return None
    if not kind.__module__.startswith("torch.distributed."):
        return custom
    by = (method for name, method in _ALLOCATING.items() if kind.__name__.startswith(name))
    return next(by, None)


_ALLOCATING = {
    "ProcessGroupAlloc": "set_allocate_memory_from_process_group_for_comm",
    "SymmMem": "set_symm_mem_for_comm",
}
"""The classes of torch that allocate in other ways, by the start of their names, and what sets them."""


def groups_of_parameters(module: FSDPModule) -> int:
    """The number of groups in which FSDP gathers a module's parameters: one for each of their meshes."""
    return len(private.communications(module))
