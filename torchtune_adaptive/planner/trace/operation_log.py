"""A log of what each operation of a traced step computes, reads and writes, and of streams' waiting.

The dispatch mode that records memory sees each operation anyway; here it is also noted for the time model. On
a fake device, streams and events report what they do (``fake_device.heard_by``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from torchtune_adaptive.planner.private import group_of, schema_of, tree_leaves
from torchtune_adaptive.planner.speed.operations import (
    ATTENTION,
    COLLECTIVE,
    COPY,
    ELSEWHERE,
    GATHERS,
    GEMM,
    HOST_WAIT,
    MEMORY,
    REDUCES,
    Operation,
    StepOperations,
)
from torchtune_adaptive.planner.trace import fake_device

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
_VIEWS = ("detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "is_pinned")
_WITHOUT_KERNEL = frozenset((*_ALLOCATIONS, *_VIEWS))
_SCALED = "_scaled_mm"
"""A product of 8 bits, whose speed is taken to be that of its result's type."""
_INTEGER = "_int_mm"
"""A product of integers of 8 bits, whose speed is taken to be that of 16 bits."""
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, _SCALED: 0, _INTEGER: 0}
"""Matrix products, and which argument is the left factor."""
_GROUPED = "_grouped_mm"
"""The products of experts, each of its own rows."""
_LOOKUPS = frozenset(("embedding", "nll_loss_forward", "gather", "index", "index_select"))
"""Operations that read only the rows that are asked for."""
_ONLY_WRITTEN = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_"))
"""Operations that do not read the tensor that they change."""
_NOT_COMPILED = frozenset((GATHERS, "split_with_sizes_copy", REDUCES, "compiled"))
"""Memory-bound kernels that a compiled layer does not contain."""
_SMALL = 1 << 12
"""Bytes on the host that are scalars and indices, not tensors to copy."""


class _Signature(NamedTuple):
    """Facts from the schema of an operation, looked up once."""

    name: str
    kind: str
    writes: tuple[tuple[int, str, bool], ...]
    """Arguments that are changed: position, name, whether they are read as well."""
    causal: int | None
    flops: Callable[..., int] | None
    functional: bool
    """Whether it is a collective that gives a new tensor, as tensor parallelism has them."""


class _Use(NamedTuple):
    """The blocks that an operation reads and writes, with the bytes of each."""

    reads: dict[int, int]
    writes: dict[int, int]


Entry = tuple[Operation, _Use | None]
"""An operation, and what it uses, where that is known."""


class OperationLog:
    """Collects the operations of a step, in the ``phase`` that is running.

    ``layer`` is the number of the layer whose forward pass is running, from 1; else 0. In the backward pass
    that is a repetition. So is whatever else has gradients enabled there. Functions with a backward pass of
    their own disable them: outside of layers, these are no repetitions.
    """

    def __init__(
        self,
        device_type: str,
        block_of: Callable[[torch.UntypedStorage], int],
        phase: Callable[[], str],
        layer: Callable[[], int],
    ) -> None:
        self._device_type, self._block_of = device_type, block_of
        self._phase, self._layer = phase, layer
        self.times: float = 1
        """How many times what is noted now is done."""
        self._parts: list[list[Entry]] = [[]]
        self._signatures: dict[Any, _Signature] = {}

    def next_part(self) -> None:
        """Begin the next micro-batch, or the update."""
        self._parts.append([])

    @property
    def entries(self) -> list[Entry]:
        """The entries of this part so far."""
        return self._parts[-1]

    def repeat(self, entries: Iterable[Entry], blocks: Mapping[int, int]) -> None:
        """Note operations once more, now, that use other blocks: by those that they used."""
        phase, stream, repeats = self._phase(), _stream(), self._repeats("")
        for operation, use in entries:
            assert use is not None
            reads, writes = ({blocks[b]: size for b, size in each.items()} for each in use)
            now = operation._replace(phase=phase, stream=stream, repeats=repeats)
            self._parts[-1].append((now, _Use(reads, writes)))

    def finish(self) -> StepOperations:
        """The step, with what a compiler would fuse."""
        last_read: dict[int, int] = {}
        for at, (_, use) in enumerate(entry for part in self._parts for entry in part):
            last_read.update(dict.fromkeys(use.reads, at) if use else {})
        parts, first = [], 0
        for part in self._parts:
            parts.append(_fused(part, first, last_read))
            first += len(part)
        self._parts = [[]]
        return StepOperations(parts[:-1], parts[-1])

    def synchronize(self, kind: str, stream: int, event: int) -> None:
        """Note that a stream records an event or waits for one, or that the host waits."""
        self._add(Operation(kind, "", self._phase(), stream, event=event))

    def copied(self, nbytes: int) -> None:
        """Note a copy to the host or back that no operation shows."""
        self._add(Operation(COPY, "offload", self._phase(), _stream(), nbytes=nbytes))

    def ran(
        self,
        name: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        besides: int,
        products: fake_device.Products | None = None,
    ) -> None:
        """Note a kernel that no operation shows: of attention, or one that memory bounds."""
        use = _Use(self._by_block(reads), self._by_block(writes))
        if products is None:
            self._note_used(MEMORY, name, use, besides=besides)
        else:
            flops, dtype, shape = products
            self._note_used(ATTENTION, name, use, dtype, flops, shape, besides)

    def compiled(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note a compiled function that reads and writes tensors in one kernel."""
        self._note_sized(MEMORY, "compiled", 2 * sum(map(_nbytes, tensors)))

    def read_by_host(self, tensor: torch.Tensor) -> None:
        """Note that the host reads a value, and so waits for the device."""
        if tensor.device.type == self._device_type:
            self.synchronize(HOST_WAIT, _stream(), 0)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation that has just run."""
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = _signature(func)
        if not signature.kind:
            return
        given, returned = _tensors((args, kwargs)), _tensors(result)
        on_device = [t for t in (*given, *returned) if t.device.type == self._device_type]
        if not on_device:
            return
        if signature.kind == COLLECTIVE:
            group, size = group_of((*args, *kwargs.values())), max(map(_nbytes, on_device))
            # What is functional gives a new tensor, and whoever asked for it waits: on the stream that runs.
            repeats = self._repeats(signature.name) if signature.functional else 0
            if signature.functional and signature.name == "all_reduce":
                self._note_sized(MEMORY, "clone", 2 * size, repeats=repeats)  # it reduces a copy
            self._note_sized(COLLECTIVE, signature.name, size, group, repeats)
            return
        if signature.name == GATHERS:  # of the output it writes only this rank's part
            parts = _tensors(args[0])
            self._note_sized(MEMORY, GATHERS, 2 * sum(map(_nbytes, parts)), (len(parts),))
            return
        if len(on_device) < len(given) + len(returned):
            elsewhere = [t for t in (*given, *returned) if t.device.type != self._device_type]
            if (size := max(map(_nbytes, elsewhere))) >= _SMALL:
                self._note_sized(COPY, signature.name, size)
            to_host = returned and returned[0].device.type != self._device_type
            waits = not kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
            if to_host and waits:
                self.synchronize(HOST_WAIT, _stream(), 0)
            if size >= _SMALL:
                return
        changed = [
            (_tensors(kwargs.get(name, args[at] if at < len(args) else None)), read)
            for at, name, read in signature.writes
        ]
        self._note_kernel(signature, args, kwargs, given, changed, returned, result)

    def _note_sized(
        self, kind: str, name: str, nbytes: int, shape: tuple[float, ...] = (), repeats: int = 0
    ) -> None:
        where, sizes = (self._phase(), _stream()), (nbytes, nbytes)
        self._add(Operation(kind, name, *where, "", 0.0, *sizes, shape=shape, repeats=repeats))

    def _note_kernel(  # type: ignore[no-untyped-def]
        self, signature: _Signature, args, kwargs, given, changed, returned, result
    ) -> None:
        only_written = {id(t) for tensors, read in changed if not read for t in tensors}
        reads = self._by_block(t for t in given if id(t) not in only_written)
        writes = self._by_block([t for tensors, _ in changed for t in tensors] or returned)
        flops = 0.0
        shape: tuple[float, ...] = ()
        first = returned[0] if returned else given[0]
        dtype = str(first.dtype)[6:]
        if signature.name in _LOOKUPS:
            written = sum(writes.values())
            reads = {block: min(size, max(4 * written, 64)) for block, size in reads.items()}
        elif signature.name in _PRODUCTS:
            left, right = args[_PRODUCTS[signature.name] :][:2]
            batch = left.shape[0] if left.dim() == 3 else 1
            shape = (batch, left.shape[-2], right.shape[-1], left.shape[-1])
            flops = _flops_of(shape)
            if signature.name == _INTEGER:
                dtype = "float16"
            elif signature.name != _SCALED:  # a product of 16 bits may be added to a sum of 32
                dtype = str(left.dtype)[6:]
        elif signature.name == _GROUPED:
            shape = _grouped(*args[:3], kwargs.get("offs"))
            flops = _flops_of(shape)
        elif signature.kind == ATTENTION:
            dtype = str(given[0].dtype)[6:]
            flops, shape = _attention(signature, args, kwargs)
        elif signature.flops is not None:
            flops = float(signature.flops(*args, **kwargs, out_val=result))
        else:
            shape = _rows_and_columns(signature, args, kwargs, given, returned)
        self._note_used(signature.kind, signature.name, _Use(reads, writes), dtype, flops, shape)

    def _note_used(
        self,
        kind: str,
        name: str,
        use: _Use,
        dtype: str = "",
        flops: float = 0.0,
        shape: tuple[float, ...] = (),
        besides: int = 0,
    ) -> None:
        nbytes = self.times * (sum(use.reads.values()) + sum(use.writes.values()) + besides)
        if kind == GEMM and shape:
            shape = (shape[0] * self.times, *shape[1:])
        operation = Operation(
            *(kind, name, self._phase(), _stream(), dtype, flops * self.times),
            *(nbytes, nbytes),
            shape=shape,
            repeats=self._repeats(name),
            times=self.times,
        )
        self._parts[-1].append((operation, use))

    def _repeats(self, name: str) -> int:
        """The layer whose forward pass an operation of this name repeats, if it runs now."""
        if self._phase() != "backward":
            return 0
        begins = name == "ones_like"  # the gradient of the loss: it repeats nothing
        elsewhere = ELSEWHERE if torch.is_grad_enabled() and not begins else 0
        return self._layer() or elsewhere

    def _by_block(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Bytes by block; views of one block that do not overlap count separately."""
        sizes: dict[tuple[int, int], int] = {}
        for tensor in tensors:
            key = (self._block_of(tensor.untyped_storage()), int(tensor.storage_offset()))
            sizes[key] = max(sizes.get(key, 0), _nbytes(tensor))
        found: dict[int, int] = {}
        for (block, _), size in sizes.items():
            found[block] = found.get(block, 0) + size
        return found

    def _add(self, operation: Operation) -> None:
        self._parts[-1].append((operation, None))


def _stream() -> int:
    return fake_device.current_stream().number


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that have to be moved for a tensor: expanded dimensions are read once."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            size *= length
    return size


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _signature(func: Any) -> _Signature:
    """The signature of an operation, before it runs."""
    schema = schema_of(func)
    name = schema.name.split("::")[1]
    writes = tuple(
        (at, one.name, not (one.name == "out" or name in _ONLY_WRITTEN))
        for at, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    infos = [one.alias_info for one in schema.returns]
    is_view = bool(infos) and all(info is not None and not info.is_write for info in infos)
    flops = flop_registry.get(func.overloadpacket)
    causal = next((at for at, one in enumerate(schema.arguments) if one.name == "is_causal"), None)
    functional = func.namespace in ("_c10d_functional", "_dtensor")
    if func.namespace == "c10d" or functional:
        launches = schema.returns and name not in ("barrier", "wait_tensor")
        kind = COLLECTIVE if launches else ""
    elif name in _WITHOUT_KERNEL or (is_view and not writes):
        kind = ""
    elif "scaled_dot_product" in name:
        kind = ATTENTION
    else:
        is_product = name in _PRODUCTS or name == _GROUPED or flops is not None
        kind = GEMM if is_product else MEMORY
    return _Signature(name, kind, writes, causal, flops, functional)


def _attention(
    signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[float, tuple[float, ...]]:
    """FLOPs and dimensions. Two products forward, five backward; the masked half of causal attention is
    skipped."""
    backward = "backward" in signature.name
    query, key = args[1:3] if backward else args[:2]
    batch, heads, length, dim = query.shape
    flops = (10.0 if backward else 4.0) * batch * heads * length * key.shape[2] * dim
    at = signature.causal
    causal = at is not None and kwargs.get("is_causal", args[at] if at < len(args) else False)
    return (flops / 2 if causal else flops), (batch * heads, length, key.shape[2], dim)


def _grouped(
    left: torch.Tensor, right: torch.Tensor, *ends: torch.Tensor | None
) -> tuple[float, float, float, float]:
    """Dimensions of a grouped product whose groups are as large as each other, as where a router sends rows
    evenly to experts; ``ends`` says where groups end. The dimension in which they follow each other is the
    one that a factor of two dimensions has, and what it is multiplied with has for each group."""
    (rows, inner), columns = left.shape[-2:], right.shape[-1]
    if left.dim() == right.dim() == 3:
        return (left.shape[0], rows, columns, inner)
    groups = next(len(one) for one in ends if one is not None)
    if left.dim() == right.dim():
        return (groups, rows, columns, inner / groups)
    if left.dim() == 2:
        return (groups, rows / groups, columns, inner)
    return (groups, rows, columns / groups, inner)


def _flops_of(shape: tuple[float, ...]) -> float:
    """The FLOPs of a matrix product: batch, m, n, k."""
    batch, m, n, k = shape
    return 2.0 * batch * m * n * k


def _rows_and_columns(  # type: ignore[no-untyped-def]
    signature: _Signature, args, kwargs, given: list[torch.Tensor], returned: list[torch.Tensor]
) -> tuple[float, ...]:
    """What a norm or softmax works on, what a sum down the columns adds up, and how many gradients FSDP
    reduces at a time; else nothing."""
    if signature.name == REDUCES:
        return (len(_tensors(args[0])),)
    if not given or given[0].dim() < 2:
        return ()
    columns = given[0].shape[-1]
    if signature.name == "sum":
        along = kwargs.get("dim", args[1] if len(args) > 1 else None) or ()
        last = given[0].dim() - 1
        # There may be as many rows as columns, so the size of the result does not tell.
        down = bool(along) and not {-1, last}.intersection(along)
        counts = down and returned[0].numel() == columns
    else:
        counts = any(part in signature.name for part in ("_norm_backward", "softmax"))
    return (given[0].numel() / columns, columns) if counts else ()


def _fused(part: list[Entry], first: int, last_read: dict[int, int]) -> list[Operation]:
    """The operations with their bytes in a compiled step: runs of memory-bound ones become one kernel, which
    reads what comes from outside and writes what is read after it. ``first`` is the number of the part's
    first operation in the step, ``last_read`` that of the last operation that reads a block."""
    operations = [operation for operation, _ in part]
    for group in _runs(operations):
        end = first + group[-1]
        others = set(range(group[0], group[-1])) - set(group)
        read_between = {block for at in others if (use := part[at][1]) for block in use.reads}
        made, seen = set[int](), set[int]()
        for at in group:
            use = part[at][1]
            if use is None:
                continue
            left = sum(size for block, size in use.reads.items() if block not in made | seen)
            seen.update(use.reads)
            for block, size in use.writes.items():
                needed = last_read.get(block, end + 1) > end or block in read_between
                left += size if needed and block not in made else 0
                made.add(block)
            operations[at] = operations[at]._replace(fused_bytes=left, joins=at != group[0])
    return operations


def _runs(operations: list[Operation]) -> list[list[int]]:
    """The positions of operations that become one kernel, of each such kernel."""
    runs: list[list[int]] = [[]]
    for at, operation in enumerate(operations):
        if operation.name.startswith(("_foreach", "_fused")):
            continue  # of one in backward: its hooks run when the compiled backward of a layer is over
        last = operations[runs[-1][-1]] if runs[-1] else operation
        together = last.stream == operation.stream and last.phase == operation.phase
        fusible = (
            operation.kind == MEMORY
            and operation.phase in ("forward", "backward")  # which are compiled
            and operation.name not in _NOT_COMPILED
        )
        if not (fusible and together):
            runs.append([])
        if fusible:
            runs[-1].append(at)
    return [run for run in runs if len(run) > 1]
