"""The device that traces take for a GPU: what runs there as one kernel."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchgen
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.planner.speed.operations import COLLECTIVE, RECORD, WAIT
from torchtune_adaptive.planner.trace import fake_device, kernels
from torchtune_adaptive.planner.trace.async_reductions import AsyncReductions
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch

OPERATIONS = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
"""torch's own list of operations, with the devices that have a kernel for each."""


def test_operations_that_gpus_have_kernels_for_are_not_taken_apart() -> None:
    listed = yaml.safe_load(OPERATIONS.read_text())
    by_name = {each["func"].partition("(")[0]: each for each in listed}

    def devices(operation: dict[str, Any]) -> set[str]:
        of = ",".join(operation.get("dispatch") or ())
        found = {device.strip() for device in of.split(",")}
        same = by_name.get(operation.get("structured_delegate", ""))
        return found | devices(same) if same else found

    both = {"CUDA", "CompositeImplicitAutograd"}
    expected = sorted(name for name, operation in by_name.items() if both <= devices(operation))
    assert expected == sorted(fake_device._KERNELS_OF_GPUS)


@pytest.mark.ranks
def test_backward_passes_allocate_gradients_alone() -> None:
    run_ranks(backward_passes, 1, join=False)


def backward_passes() -> None:
    device = fake_device.device()
    recorder = Recorder(device)

    def allocated() -> list[int]:
        return [event.nbytes for event in recorder.take_events().events if event.nbytes >= 0]

    with FakeTensorMode() as mode, Watch(recorder, mode):
        for function in (F.silu, F.mish, F.gelu, lambda x: F.rms_norm(x, x.shape[1:])):
            leaf = torch.empty(4, 256, device=device, requires_grad=True)
            recorder.take_events()
            result = function(leaf)
            assert allocated()[0] == leaf.nbytes
            gradient = torch.empty_like(result)
            recorder.take_events()
            result.backward(gradient)
            assert allocated() == [leaf.nbytes], function


@pytest.mark.ranks
def test_softmax_is_that_of_gpus() -> None:
    run_ranks(softmax_passes, 1, join=False)


def softmax_passes() -> None:
    """Backward multiplies the gradient and the result first; float16 becomes float32 on the way, bfloat16
    before."""
    device = fake_device.device()
    recorder = Recorder(device)

    def allocated() -> list[int]:
        return [event.nbytes for event in recorder.take_events().events if event.nbytes >= 0]

    with FakeTensorMode() as mode, Watch(recorder, mode):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            leaf = torch.empty(4, 256, device=device, dtype=dtype, requires_grad=True)
            wide = 4 * leaf.numel()
            recorder.take_events()
            result = kernels.softmax(leaf, -1, dtype=torch.float32)
            converts = dtype == torch.bfloat16
            assert allocated() == [wide] * (1 + converts), dtype
            gradient = torch.empty_like(result)
            recorder.take_events()
            result.backward(gradient)
            of_input = leaf.nbytes if not converts else wide
            assert sorted(allocated()) == sorted([wide, of_input] + [leaf.nbytes] * converts), dtype
            assert leaf.grad is not None and leaf.grad.dtype == dtype


def test_asynchronous_reductions_run_beside_what_follows() -> None:
    heard: list[tuple[str, int, int]] = []

    class Listener:
        def synchronize(self, *told: Any) -> None:
            heard.append(told)

    def all_reduce(*_: Any, **__: Any) -> None:
        heard.append((COLLECTIVE, fake_device.current_stream().number, 0))

    launch = AsyncReductions().instead_of(all_reduce)
    with fake_device.numbering_streams(count(1)), fake_device.heard_by(Listener()):  # type: ignore[arg-type]
        first, second = (launch(torch.ones(1), async_op=True) for _ in range(2))
        assert launch(torch.ones(1)) is None
        assert second.wait() and first.wait()
    events = [event for kind, _, event in heard if kind == RECORD]
    assert heard == [
        *((RECORD, 0, events[0]), (WAIT, 1, events[0]), (COLLECTIVE, 1, 0), (RECORD, 1, events[1])),
        *((RECORD, 0, events[2]), (WAIT, 1, events[2]), (COLLECTIVE, 1, 0), (RECORD, 1, events[3])),
        (COLLECTIVE, 0, 0),
        *((WAIT, 0, events[3]), (WAIT, 0, events[1])),
    ]
