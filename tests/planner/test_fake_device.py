"""The device that traces take for a GPU: what runs there as one kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch


def test_what_cpus_have_kernels_for_is_not_taken_apart() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    operations = [
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")
    ]
    both = [
        name.removeprefix("aten::")
        for name in operations
        if has(name, "CompositeImplicitAutograd") and has(name, "CPU")
    ]
    assert sorted(both) == sorted(fake_device._SINGLE_KERNELS)


@pytest.mark.ranks
def test_backward_passes_of_activations_allocate_their_gradient_alone() -> None:
    run_ranks(backward_passes, 1, join=False)


def backward_passes() -> None:
    device = fake_device.device()
    recorder = Recorder(device)
    with FakeTensorMode() as mode, Watch(recorder, mode):
        for activation in (F.silu, F.mish, F.gelu):
            leaf = torch.empty(1024, device=device, requires_grad=True)
            result = activation(leaf)
            gradient = torch.empty_like(result)
            recorder.take_events()
            result.backward(gradient)
            sizes = [event.nbytes for event in recorder.take_events().events if event.nbytes >= 0]
            assert sizes == [leaf.nbytes], activation
