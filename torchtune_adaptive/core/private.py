"""All private interfaces of torch that the core needs, as there is no public way.

Each was checked on torch 2.11, 2.13 and 2.15, where it does not say otherwise.
"""

# ruff: noqa: F401 - what is imported here is for the other modules of the package
from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._triton
from torch._ops import HigherOrderOperator

# Dispatch modes see each operation; trees are how torch itself walks through arguments and results.
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

# What torch's own clipping and optimizers are made of: one kernel for many tensors. The public
# ``get_total_norm`` would round bf16 norms to bf16.
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_

# How often a tensor has been changed in place; the notes on autograd name it.
version_of = attrgetter("_version")

# The number of the backward pass in which a hook is called; one within another has its own.
backward_running = torch._C._current_graph_task_id


def schema_of(operation: Any) -> Any:
    """The arguments and results of an operation, with what they share."""
    return operation._schema


def record_memory_history(device: torch.device, enabled: bool) -> None:
    """Start or stop the recording that a memory snapshot shows; torchtune's recipes do it in this way."""
    memory = torch.get_device_module(device).memory
    memory._record_memory_history(enabled="all" if enabled else None)


def empty_host_cache() -> None:
    """Give back pinned host memory, as offloaded activations leave it, which is cached like the device's.

    Public since torch 2.13; before, there was only ``torch._C._host_emptyCache``, in builds for CUDA. Checked
    on torch 2.13 (both names); in the sources, on 2.11.
    """
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(
        torch._C, "_host_emptyCache", None
    )
    if empty is not None:
        empty()


def launches_of(group: dist.ProcessGroup) -> int | None:
    """The number of collectives that a group has launched, which NCCL and gloo count; None if not known.

    It tells whether a launch that raised has taken place (checked on torch 2.13).
    """
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None


def groups_here() -> list[dist.ProcessGroup]:
    """The process groups that this process belongs to, in the order in which they were made; there is no
    public list (checked on torch 2.13)."""
    return [*dist.distributed_c10d._world.pg_map]


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change how long the ranks of a gloo group wait for each other; publicly, only a new group can.

    What has been launched waits as long as it did. torch's own ``_set_pg_timeout`` leaves a group alone that
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps in another. Checked on torch 2.13.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


def call_inside(operator: Any, positional: Any, named: Any) -> Any:
    """Call an operator's kernel for the device of its tensors, so that dispatch modes see what it calls.

    A mode that calls the operator itself sees nothing of that (checked on torch 2.13). As torch does, it
    takes the device's kernel although offsets or seeds are on the host.
    """
    leaves = tree_leaves((positional, named))
    types = {leaf.device.type: None for leaf in leaves if torch.is_tensor(leaf)}
    if not types:
        return operator(*positional, **named)
    device = next((each for each in types if each != "cpu"), "cpu")
    key = torch._C._dispatch_key_parse(torch._C._dispatch_key_for_device(device))
    return operator.redispatch(torch._C.DispatchKeySet(key), *positional, **named)


def group_in(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an operator was given, if the argument is one (checked on torch 2.13)."""
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument)
    return None


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective names."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def unfinished_works() -> int:
    """The number of functional collectives that nobody has waited for (checked on torch 2.13)."""
    return int(torch._C._distributed_c10d._get_work_registry_size())


def graphed_by(function: Any) -> str:
    """What replays a function, or a module, as CUDA graphs, if anything does.

    What ``torch.compile`` makes gives its settings in public, as inductor sees them: with those of a mode,
    and with TORCHINDUCTOR_CUDAGRAPHS. Where a module keeps it is not public (torch 2.13).
    """
    places = [function]
    if isinstance(function, torch.nn.Module):
        places += [function._compiled_call_impl, vars(function).get("forward")]
    for place in places:
        settings: Any = getattr(place, "get_compiler_config", dict)() or {}
        if settings.get("triton.cudagraphs"):
            return "torch.compile"
        if getattr(place, "__module__", None) == "torch.cuda.graphs":
            return "make_graphed_callables"
    return ""


def drop_masks() -> None:
    """Drop the masks of embeddings that tensor parallelism splits, which a failure has left in use.

    torch keeps a mask with a placement that it caches for each shape, until the embedding is whole. It would
    refuse later rows of that shape with other tokens ("MaskBuffer has been materialized with conflicting
    data"). Checked on torch 2.13.
    """
    for each in gc.get_objects():
        if type(each).__name__ == "MaskBuffer" and type(each).__module__.startswith("torch."):
            each.data, each.refcount = None, 0


class _NoReducer:
    """What ``DistributedDataParallel`` has instead of its reducer, and of that one's logger: it calls nothing
    else of them in forward and backward, and Lightning asks for what would be logged."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.strs_map: dict[str, str] = {}
        self.ints_map: dict[str, int] = {}

    def prepare_for_forward(self) -> None: ...

    def set_runtime_stats_and_log(self) -> None: ...

    def prepare_for_backward(self, outputs: Any) -> None:
        self.owner.expected = True

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None: ...

    def _get_ddp_logging_data(self) -> _NoReducer:
        return self


def reduce_instead(wrapped: DistributedDataParallel, owner: Any) -> None:
    """Drop the reducer of a wrapper, which gives back its buckets and removes its hooks; ``owner`` reduces
    instead. ``owner.expected`` is set where the wrapper has run to go backward and reduce gradients."""
    wrapped.reducer = wrapped.logger = _NoReducer(owner)  # type: ignore[assignment]


def reduces_instead(wrapped: DistributedDataParallel) -> Any:
    """Who does; None if the wrapper has its reducer."""
    present = getattr(wrapped, "reducer", None)  # which no fake one has
    return present.owner if isinstance(present, _NoReducer) else None


def has_communication_hook(wrapped: DistributedDataParallel) -> bool:
    """Whether a hook was registered that communicates in place of DDP (torch 2.13)."""
    return bool(getattr(wrapped, "_comm_hooks", None))


# --- FSDP2 ----------------------------------------------------------------------------------------------


def has_run(root: FSDPModule) -> bool:
    """Whether FSDP has run at all; before that, ``reset_iter_state`` fails."""
    return root._get_fsdp_state()._is_root is not None


def reset_iter_state(root: FSDPModule) -> None:
    """``FSDPModule.reset_iter_state``, also for torch 2.11 and 2.12, which do not have it.

    What only one of these two versions has is set where it exists.
    """
    if hasattr(root, "reset_iter_state"):
        return root.reset_iter_state()
    root_state = root._get_fsdp_state()
    if root_state._device.type != "cpu":
        torch.accelerator.synchronize(root_state._device)  # instead of waiting for each event
    idle = type(root_state._training_state).IDLE
    shared = root_state._comm_ctx
    shared.all_gather_state = None
    if hasattr(shared, "reduce_scatter_states"):
        shared.reduce_scatter_states.clear()
    else:
        shared.reduce_scatter_state = None  # type: ignore[attr-defined]
    shared.post_forward_order.clear()
    for state in root_state._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in _parameter_groups(state):
            group._all_gather_result = None
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    root_state._state_ctx.iter_forward_root = None
    root_state._state_ctx.post_backward_final_callback_queued = False


def drop_unsharded_gradients(root: FSDPModule) -> None:
    """Drop the gradients of unsharded parameters, and those that wait in another dtype to be reduced."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in _parameter_groups(state):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(
                    parameter, "_unsharded_param"
                ):  # after it was gathered for the first time
                    parameter._unsharded_param.grad = None


def free_gathered(root: FSDPModule) -> None:
    """Free what a gathering that failed had allocated: FSDP takes its parameters for sharded already.

    Without it, the bytes stay until the parameters are gathered again (checked on torch 2.13).
    """
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in _parameter_groups(state):
            for parameter in group.fsdp_params:
                parameter.free_unsharded_param()


def left_unsharded(module: FSDPModule) -> list[str]:
    """The parameters that FSDP2 shards with this module, and has not now (checked on torch 2.13). Which of a
    module's parameters were ``ignored_params``, it does not tell."""
    infos = [
        parameter._module_info
        for group in _parameter_groups(module._get_fsdp_state())
        for parameter in group.fsdp_params
    ]
    return [
        one.param_name
        for one in infos
        if not isinstance(getattr(one.module, one.param_name), DTensor)
    ]


def reduction_changes(module: FSDPModule) -> list[str]:
    """The methods of FSDP2 that have changed how gradients are reduced (checked on torch 2.13)."""
    changes = {
        "set_requires_gradient_sync(False)": lambda group: not group.reduce_grads,
        "set_requires_all_reduce(False)": lambda group: not group.all_reduce_grads,
        "set_all_reduce_hook": lambda group: group._all_reduce_hook is not None,
    }
    groups = _parameter_groups(module._get_fsdp_state())
    return [name for name, is_so in changes.items() if any(map(is_so, groups))]


def divide_factors(module: FSDPModule) -> list[float | None]:
    """The numbers that ``set_gradient_divide_factor`` has set (checked on torch 2.13)."""
    return [g.gradient_divide_factor for g in _parameter_groups(module._get_fsdp_state())]


@dataclass(frozen=True)
class Spread:
    """The ranks over which FSDP averages gradients."""

    size: int
    here: tuple[int, int]
    """The place of this rank among them."""
    replicas: dist.ProcessGroup | None
    """Those that hold the same shard, with HSDP."""


def spread_by(module: FSDPModule) -> Spread | None:
    """The ranks over which FSDP averages a module's gradients; None if it manages no parameter.

    With tensor parallelism, the mesh of a parameter has more dimensions, and nothing public tells which of
    them are FSDP's (checked on torch 2.13).
    """
    for group in _parameter_groups(module._get_fsdp_state()):
        about = group.mesh_info
        size, copies = (getattr(about, f"{of}_mesh_size", 1) for of in ("shard", "replicate"))
        rank, copy = (getattr(about, f"{of}_mesh_rank", 0) for of in ("shard", "replicate"))
        replicas = getattr(about, "replicate_process_group", None)
        return Spread(size * copies, (copy, rank), replicas)
    return None


def begin(root: FSDPModule) -> None:
    """What FSDP does before a root runs for the first time."""
    root._get_fsdp_state()._lazy_init()


def resharding(module: FSDPModule) -> list[Any]:
    """What FSDP does with the parameters of a module after forward; public to set only."""
    return [group.post_forward_mesh_info for group in _parameter_groups(module._get_fsdp_state())]


def set_resharding(module: FSDPModule, before: list[Any]) -> None:
    """Set what ``resharding`` gave."""
    for group, info in zip(_parameter_groups(module._get_fsdp_state()), before, strict=True):
        group.post_forward_mesh_info = info


def communications(module: FSDPModule) -> list[tuple[Any, Any]]:
    """What launches the all-gathers and the reduce-scatters of a module, for each group of its parameters."""
    groups = _parameter_groups(module._get_fsdp_state())
    return [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]


def _parameter_groups(state: Any) -> list[Any]:
    """The parameters that an FSDP module shards together; one until torch 2.12."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def compile_for_all_sizes(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Let what is compiled for this tensor fit others that have other sizes in these dimensions, but 1.
    Checked on torch 2.11 and 2.13."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def can_run_triton() -> bool:
    """Whether there is Triton, and a device that it supports. This initializes CUDA."""
    return torch.utils._triton.has_triton()


@contextmanager
def triton_known(can_run: bool) -> Iterator[None]:
    """A context in which torch does not ask the first GPU whether it can run Triton, as torchao's import lets
    it do. Checked on torch 2.11 and 2.13."""
    ask = torch.utils._triton.has_triton
    torch.utils._triton.has_triton = lambda: can_run  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.utils._triton.has_triton = ask


def end_workers(batches: Any) -> None:
    """End the processes that fetch the batches of a ``DataLoader``, of which this is the iterator. In public,
    they end with the iterator, and anything may still refer to that. Checked on torch 2.13."""
    batches._shutdown_workers()
    for worker in batches._workers:
        worker.kill()  # unless it has ended: a dataset may wait for a disk, and SIGTERM is ignored
