"""All private interfaces of torch that tracing needs, as there is no public way.

Each was checked on torch 2.11, 2.13 and 2.15, where it does not say otherwise. Whether traces are right with
the installed version is checked as well, before one is used (see ``recipe.tracing.self_check``).
"""

# ruff: noqa: F401 - what is imported here is for the other modules of the package
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload

# Fake tensors have shapes and storages, but no memory; dispatch modes see each operation.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # whatever a program gets by their names
    _resolve_process_group,
    destroy_process_group,
    get_backend,
    init_process_group,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

# A context in which no dispatch mode or subclass sees an operation.
without_dispatch = torch._C._DisableTorchDispatch
# A context without the dispatch modes that are active.
without_modes = _disable_current_modes
# Gives torch a device that Python supplies; every other way takes a build of torch.
register_device = _setup_privateuseone_for_python_backend


def join_fake_group(backend: str, devices: list[str], rank: int, ranks: int) -> None:
    """Join a process group, registered as ``backend``, whose collectives return tensors without values. Where
    this process is already in one of as many ranks, it stays: several tracers may use it."""
    from torch.testing._internal.distributed import fake_pg

    if backend not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            backend, fake_pg._create_fake_pg, extended_api=True, devices=devices
        )
    if dist.is_initialized():
        if (get_backend(), dist.get_rank(), dist.get_world_size()) == (backend, rank, ranks):
            return
        destroy_process_group()
    init_process_group(backend, rank=rank, world_size=ranks, store=fake_pg.FakeStore())


def schema_of(operation: Any) -> Any:
    """The name, arguments and results of an operation."""
    return operation._schema


def group_of(arguments: Iterable[Any]) -> tuple[int, ...]:
    """The size of the process group among a collective's arguments, and the distance of its ranks; empty if
    there is none (torch 2.13). Functional collectives name it, as the last of their texts."""
    arguments = [*arguments]
    if names := [each for each in arguments if isinstance(each, str)]:
        arguments = [_resolve_process_group(names[-1])]  # type: ignore[arg-type]
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):  # the group comes before the kind of reduction
            argument = dist.ProcessGroup.unbox(argument)
        if isinstance(argument, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(argument)
            return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return ()


def in_backward() -> bool:
    """Whether autograd runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def references(storage: torch.UntypedStorage) -> int:
    """The references to a storage, which autograd counts to decide whether it sums in place."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_same(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether two Python objects stand for one storage."""
    return one._cdata == other._cdata


def with_shard(sharded: DTensor, make: Callable[[torch.Tensor], torch.Tensor]) -> DTensor:
    """A tensor that is sharded in the same way, with a shard that is made from that of the first."""
    return DTensor(make(sharded._local_tensor), sharded._spec, requires_grad=False)


def communication_streams(model: nn.Module) -> Any:
    """The streams on which FSDP allocates what it gathers and reduces, as attributes; None without FSDP."""
    return model._get_fsdp_state()._comm_ctx if isinstance(model, FSDPModule) else None


Replacements = Iterable[tuple[Any, str, Any]]
"""Replacements in torch: owner, name, replacement."""


@contextmanager
def replaced(replacements: Replacements) -> Iterator[None]:
    """A context with these replacements."""
    with ExitStack() as undo:
        for each in replacements:
            undo.enter_context(mock.patch.object(*each))
        yield


def of_meshes() -> Replacements:
    """Replacements while tensors are fake. A mesh of devices is a tensor of ranks' numbers, in which a rank
    looks for its own; FSDP makes one where tensors are split already."""
    make = DeviceMesh.__init__

    def with_values(mesh: DeviceMesh, *arguments: Any, **options: Any) -> None:
        with without_modes():
            make(mesh, *arguments, **options)

    yield DeviceMesh, "__init__", with_values


_FOR_STRIDED = "_propagate_use_strided_shard_flag"
_CHUNKS = "_chunk_with_empty"


def of_sharding(unseen: Callable[[], AbstractContextManager[None]]) -> Replacements:
    """Replacements while a sharded model is traced. Shapes are computed ``unseen``, in a context in which
    nothing is recorded, on tensors of the whole model's size."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen_propagation(propagator: ShardingPropagator, schema: Any) -> Any:
        with unseen():
            return propagate(propagator, schema)

    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen_propagation
    yield from of_chunks()
    if hasattr(_sharding_prop, _FOR_STRIDED):  # in torch 2.13; not every version has it
        yield _sharding_prop, _FOR_STRIDED, _once_for_each_schema()


class _Chunks(Sequence[torch.Tensor]):
    """The parts of a tensor for so many ranks, as ``torch.chunk`` makes them and with empty ones at the end,
    each made where it is asked for."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, num_chunks, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, at: Any) -> Any:
        at = range(self._number)[at]  # so that it fails, or counts from the end, as with a list
        size = self._tensor.size(self._dim)
        begin = at * self._length
        if at and begin >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._length, size - begin))


def of_chunks() -> Replacements:
    """Replacements while FSDP splits parameters. It makes the parts of all ranks and keeps one of them: with
    fake tensors that is most of the set-up from some hundred ranks on. (torch 2.13; where it is done in
    another way, nothing is replaced.)"""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    make_all = getattr(_fsdp_param, _CHUNKS, None)

    def make(tensor: torch.Tensor, num_chunks: int, dim: int) -> Sequence[torch.Tensor]:
        if is_traceable_wrapper_subclass(tensor):
            return make_all(tensor, num_chunks, dim)  # quantized: only it knows how
        return _Chunks(tensor, num_chunks, dim)

    if make_all is not None:
        yield _fsdp_param, _CHUNKS, make


def _once_for_each_schema() -> Callable[..., None]:
    """torch's treatment of strided placements, in linear time: torch looks for them in all tensors of a list
    (an optimizer's, say) once for each of these tensors, which takes as long as a layer."""
    correct = getattr(_sharding_prop, _FOR_STRIDED)
    without: list[Any] = [None]

    def propagate(strategy: Any, schema: Any, *others: Any) -> None:
        if schema is without[0]:
            return
        placements = (one for spec in schema.args_spec for one in spec.placements)
        if any(isinstance(one, _StridedShard) for one in placements):
            correct(strategy, schema, *others)
        else:
            without[0] = schema  # for which it does nothing

    return propagate


# --- the compiler: AOTAutograd, the min-cut partitioner, inductor ---------------------------------

# A context in which a module has other parameters and buffers, by their names.
with_tensors = _reparametrize_module


def compiled_for(
    device: torch.device,
    mode: FakeTensorMode,
    function: Callable[..., tuple[Any, ...]],
    examples: list[torch.Tensor],
    load: Callable[[str], Callable[[list[Any]], Any]],
) -> Callable[..., list[Any]]:
    """A function that makes a tuple of tensors, as ``torch.compile`` compiles it for a GPU, without kernels.

    It will be called with tensors like the ``examples``. ``load`` makes a function of inductor's wrapper
    code: a text, whose function ``call`` allocates, releases and reuses buffers, and calls kernels. Inductor
    is changed meanwhile, for the whole process: never call it in one that trains.
    """
    from torch._functorch import config as aot_config
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext, tracing
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner, partition_fn
    from torch._inductor.decomposition import select_decomp_table

    outputs = 0

    class Wrapped(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
            nonlocal outputs
            result = function(*tensors)
            outputs = len(result)
            return result

    def compiler(backward: bool) -> Callable[..., Any]:
        def lower(graph: torch.fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
            output = next(node for node in graph.graph.nodes if node.op == "output")
            # Their strides stay as they are, as ``compile_fx`` has it.
            visible = output.args[0] if backward else output.args[0][:outputs]
            output.meta["user_visible_output_idxs"] = [
                at for at, node in enumerate(visible) if isinstance(node, torch.fx.Node)
            ]
            of_inputs = range(len(inputs))  # aligned, so they are not checked
            with without_modes(), mode:
                lowered: Any = compile_fx_inner(
                    graph, inputs, static_input_idxs=of_inputs, is_backward=backward
                )

            def call(arguments: list[Any]) -> Any:
                return lowered.current_callable(arguments)

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return lower

    made: Any = Wrapped()
    _let_inductor_know(device.type)
    with (
        replaced(_of_inductor(load)),
        inductor_config.patch(
            fx_graph_cache=False,
            compile_threads=1,
            joint_graph_constant_folding=False,  # it computes constants on the device
            max_autotune_gemm_backends="ATEN",  # as chosen by default, without asking for others
        ),
        aot_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        without_modes(),
        mode,
        tracing(TracingContext(mode)),  # inductor learns from it what it may reuse
    ):
        return aot_module_simplified(
            made,
            examples,
            fw_compiler=compiler(backward=False),
            bw_compiler=compiler(backward=True),
            inference_compiler=compiler(backward=False),
            partition_fn=partition_fn,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )


def _of_inductor(load: Callable[[str], Any]) -> Replacements:
    """Replacements in inductor while it compiles for a device that is not there."""
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.graph import GraphLowering

    def not_written(graph: Any) -> Any:
        """The code as a function, where it would be written to a file and compiled."""
        call = load(graph.codegen()[0].value)
        return SimpleNamespace(call=call, __file__="<inductor>", runner=None)

    yield GraphLowering, "_compile_to_module", not_written
    yield scheduler, "has_triton", lambda *_: True

    for module in (joint_graph, post_grad):  # patterns are traced on a real device
        made = module.lazy_init
        yield module, "lazy_init", lambda *_, made=made, **__: made(torch.device("cpu"))


_LIKE_AN_A100 = {
    "name": "A100",
    "multi_processor_count": 108,
    "major": 8,
    "minor": 0,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "total_memory": 80 << 30,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 166912,
    "shared_memory_per_multiprocessor": 167936,
    "L2_cache_size": 40 << 20,
    "gcnArchName": "",
}
"""Properties that inductor reads to split large sums. Partial sums take some hundred KiB."""


@functools.cache
def _let_inductor_know(name: str) -> None:
    """Register a device with inductor, as one whose kernels triton writes."""
    from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
    from torch._inductor import utils
    from torch._inductor.codegen import common
    from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    def gives(value: Any) -> Any:
        return staticmethod(lambda *_, **__: value)

    properties = SimpleNamespace(**_LIKE_AN_A100)
    worker = {
        "set_device": gives(None),
        "current_device": gives(0),
        "get_device_properties": gives(properties),
    }
    interface = {
        **worker,
        "Worker": type("Worker", (), worker),
        "maybe_exchange_device": gives(0),
        "exchange_device": gives(0),
        "device_count": gives(1),
        "is_available": gives(True),
        "get_raw_stream": gives(0),
        "synchronize": gives(None),
        "get_compute_capability": gives(80),
        "is_bf16_supported": gives(True),
        "is_triton_capable": gives(True),
        "raise_if_triton_unavailable": gives(None),
    }
    overrides = {
        "import_get_raw_stream_as": lambda _, called: f"{called} = lambda device: 0",
        "set_device": lambda *_: "pass",
        "synchronize": lambda *_: "pass",
        "device_guard": lambda *_: "nullcontext()",
        "current_stream": lambda *_: "None",
    }
    kernels = itertools.count()

    class Kernel(TritonKernel):
        """Its loads and stores decide which buffers there are. Its text is not needed."""

        def codegen_kernel(self, name: str | None = None) -> str:
            self.codegen_body()
            self.inductor_meta, self.triton_meta = {}, {}
            return f"# {next(kernels)}"

    class Scheduling(TritonScheduling):
        """Decides as for triton, and writes no kernel."""

        kernel_type = Kernel

        def define_kernel(self, *_: Any, **__: Any) -> str:
            return f"kernel_{next(kernels)}"

    utils.GPU_TYPES.append(name)
    known: Any = type("Interface", (DeviceInterface,), interface)
    register_interface_for_device(name, known)
    register_interface_for_device(f"{name}:0", known)
    made: Any = type("Overrides", (common.DeviceOpOverrides,), overrides)
    common.register_device_op_overrides(name, made())
    common.register_backend_for_device(name, Scheduling, PythonWrapperCodegen)
