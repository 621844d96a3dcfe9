"""All private interfaces that running a program on the fake device needs, as there is no public way.

Checked on torch 2.13, where it does not say otherwise.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import dataloader as loaders

from torchtune_adaptive.planner.private import FakeTensor, replaced
from torchtune_adaptive.planner.trace import fake_device

_device: Any = FakeTensor.device


def device_of(tensor: FakeTensor) -> torch.device:
    """The device of a fake tensor, whatever programs are told of it."""
    return _device.fget(tensor)


def let_see(device: Callable[[FakeTensor], torch.device]) -> None:
    """Let everybody see this device of a fake tensor, and modes what is asked of it."""
    del FakeTensor.tolist  # which no mode sees
    FakeTensor.device = property(device, _device.fset)  # type: ignore[assignment, method-assign]


def calls_are_seen() -> bool:
    """Whether a mode sees calls of torch. None does within one of them, as where an operation of another
    library makes a result that is fake."""
    return torch._C._len_torch_function_stack() > 0


def kernels_of(key: str) -> list[str]:
    """The names of the operations that have a kernel for a dispatch key."""
    return torch._C._dispatch_get_registrations_for_dispatch_key(key)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of another one."""
    return tensor._is_view()


def parts_of(operation: Any) -> Callable[..., Any] | None:
    """What does an operation by the others that it consists of; None if there are kernels for it."""
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, operation.name()
    if has_kernel(name, "CPU") or has_kernel(name, "PrivateUse1") or not operation._can_decompose():
        return None
    return operation.decompose


@contextmanager
def without(key: str) -> Iterator[None]:
    """A context in which kernels of a dispatch key are passed over."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield


def of_fetchers(follow: Callable[[Any], None]) -> None:
    """Call a function with each kind of what gets the rows of a batch from a dataset, and collates them, for
    a loader: by ``fetch``, with ``dataset`` and ``collate_fn``. Axolotl (0.19) has one of its own."""
    create, followed = loaders._DatasetKind.create_fetcher, set[Any]()

    def created(*arguments: Any) -> Any:
        fetcher = create(*arguments)
        if type(fetcher) not in followed:
            followed.add(type(fetcher))
            follow(type(fetcher))
        return fetcher

    loaders._DatasetKind.create_fetcher = staticmethod(created)  # type: ignore[method-assign]


def of_modules(apply: Callable[..., Any]) -> None:
    """Let modules convert and move their tensors by a function: of the module, that which converts one
    tensor, and the method as it was."""
    before = torch.nn.Module._apply

    def _apply(module: Any, function: Any, recurse: bool = True) -> Any:
        return apply(module, function, functools.partial(before, module, function, recurse))

    torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def have_parts_of_cuda() -> None:
    """Let torch have what a build for CUDA has and other libraries take as they are imported: bitsandbytes
    (0.50) and Triton (3.7)."""
    for name in ("_record_memory_history", "_dump_snapshot"):  # which the documentation has
        setattr(torch.cuda.memory, name, lambda *_, **__: None)
    torch._C._cuda_getCurrentRawStream = lambda *_: 0


def with_cuda() -> AbstractContextManager[Any]:
    """A context in which the accelerator is ``cuda`` by the name that transformers (5.23) asks for it by."""
    return replaced([(torch._C, "_get_accelerator", lambda: torch.device("cuda"))])


def let_backward_run_in(context: AbstractContextManager[Any]) -> None:
    """Let each backward pass run in a context. A mode that sees calls of torch does not see those within one
    of them, as whatever a program does in the backward pass is within the call that begins it."""
    before = torch.autograd._engine_run_backward

    def run(*arguments: Any, **options: Any) -> Any:
        with context:
            return before(*arguments, **options)

    torch.autograd._engine_run_backward = run


def _no_references(_: Any) -> list[Any]:
    return []  # not a mock, which would hold what it is called with


def swap_tensors(before: Callable[[Any, Any], None], one: Any, other: Any) -> None:
    """Swap two tensors, of which fake ones may be in a memo of their mode's, which holds no harm."""
    with mock.patch.object(weakref, "getweakrefs", new=_no_references):
        before(one, other)


def let_subclass() -> None:
    """Let tensors have fake data: subclasses that libraries make of tensors, as bitsandbytes (0.50) has for
    weights, may be made of fake ones; and a tensor whose data becomes fake, or moves, becomes fake itself."""
    before, data_of = torch.Tensor._make_subclass, torch.Tensor.data

    def made(kind: Any, data: Any, requires_grad: bool = False, **options: Any) -> torch.Tensor:
        if not isinstance(data, FakeTensor):
            return before(kind, data, requires_grad, **options)
        tensor = data.detach()
        tensor.__class__ = _fake_kind(kind)
        return tensor.requires_grad_(requires_grad)

    def set_data(tensor: Any, data: Any) -> None:
        if isinstance(tensor, FakeTensor) and not isinstance(data, FakeTensor):
            data = tensor.fake_mode.from_tensor(data)
        if not isinstance(data, FakeTensor):
            data_of.__set__(tensor, data)  # type: ignore[attr-defined]
            return
        compatible = torch._has_compatible_shallow_copy_type(tensor, data)
        if isinstance(tensor, FakeTensor) and (compatible or type(tensor) is type(data)):
            data_of.__set__(tensor, _for_backend_of(tensor, data))  # type: ignore[attr-defined]
            tensor.fake_device = data.fake_device
            return
        other = made(type(tensor), data, tensor.requires_grad)
        vars(other).update({**vars(tensor), **vars(other)})
        other._is_param = isinstance(tensor, torch.nn.Parameter)
        torch.utils.swap_tensors(tensor, other)

    torch.Tensor._make_subclass = staticmethod(made)  # type: ignore[assignment, method-assign]
    torch.Tensor.data = property(data_of.__get__, set_data)  # type: ignore[assignment, attr-defined]


def _for_backend_of(tensor: FakeTensor, data: FakeTensor) -> torch.Tensor:
    """Data that a tensor can have. A fake one stays with the backend of the device on which it was made
    (torch 2.13), wherever it is."""
    alike: torch.Tensor = data
    place = data.fake_device
    for other in (torch.device("cpu"), fake_device.device()):
        if not torch._has_compatible_shallow_copy_type(tensor, alike):
            data.fake_device = other
            alike = data.detach()
    data.fake_device = place
    return alike


@functools.cache
def _fake_kind(kind: Any) -> Any:
    """The kind of fake tensors that are of this kind as well."""
    if kind in (torch.Tensor, torch.nn.Parameter):
        return FakeTensor
    if issubclass(kind, FakeTensor):
        return kind
    return type(kind)(kind.__name__, (kind, FakeTensor), {"detach": _detach_alike})


def _detach_alike(tensor: Any) -> Any:
    """A detached tensor of the same kind, as parameters that are swapped have to be."""
    detached = torch.Tensor.detach(tensor)
    detached.__class__ = type(tensor)
    vars(detached).update(vars(tensor))
    return detached


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call a function where the backward pass ends that runs now (torch 2.13), as DDP waits there."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def of_configs(kind: Any) -> Callable[..., Any]:
    """What makes a model of a config for transformers (5.23): of the class, the config and options."""
    return kind._from_config.__func__


def let_make(kind: Any, of_config: Callable[..., Any]) -> None:
    """Let another function do that."""
    kind._from_config = classmethod(of_config)


def let_decode(generation: Any, decode: Callable[..., Any]) -> None:
    """Let a function decode in ``generate`` of transformers (5.23), once that has prepared everything: of the
    method as it was, and its arguments."""
    for name in ("_sample", "_beam_search"):
        before = getattr(generation.GenerationMixin, name)
        instead = functools.wraps(before)(functools.partial(decode, before))
        setattr(generation.GenerationMixin, name, staticmethod(instead))  # it is given the model


def goes_on(model: Any, options: dict[str, Any], tokens: int, length: int) -> dict[str, Any]:
    """Options with which decoding goes on with a cache, after so many tokens more: that length in all."""
    updated = model._update_model_kwargs_for_generation
    found = updated({}, {**options}, model.config.is_encoder_decoder, num_new_tokens=tokens)
    config = found["generation_config"] = copy.copy(options["generation_config"])
    config.is_assistant, config._mask_length = True, length
    return found


def let_serve(
    client: Any,
    get: Callable[[str], Any],
    post: Callable[[str, Any], Any],
) -> None:
    """Let functions answer what TRL (1.16) asks a server of vLLM's, which nobody is connected to."""
    kind = client.VLLMClient
    kind.check_server = lambda *_, **__: None
    kind.get_server_info = lambda self: get("/server_info")["vllm_config"]
    kind._get = lambda self, url, **_: get(url)
    kind._post = lambda self, url, json=None: post(url, json or {})


def in_buckets(parameters: Sequence[torch.Tensor], sizes: list[int]) -> list[list[int]]:
    """The places of the parameters in each bucket of ``DistributedDataParallel``."""
    sparse = [False] * len(parameters)
    return dist._compute_bucket_assignment_by_size(list(parameters), sizes, sparse)[0]
