"""Whether autograd's sums of gradients are traced as they are made with the installed version of torch."""

from __future__ import annotations

import torch

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.private import FakeTensorMode
from torchtune_adaptive.planner.trace import fake_device
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch

_GRADIENTS_MADE = 4
"""Each of the three, and the one that they flow into; their sum is in place."""


def check_sums() -> None:
    """Check it.

    Raises:
        NoPrediction: they are made in another way.
    """
    if (made := _gradients_made()) != _GRADIENTS_MADE:
        raise no_prediction(
            f"the sum of three gradients took {made} allocations instead of {_GRADIENTS_MADE}"
        )


def no_prediction(reason: str) -> NoPrediction:
    return NoPrediction(
        f"With torch {torch.__version__} the memory of a step cannot be predicted: on the self-check model, "
        f"{reason}. Use a torch version that this package was tested with (see its README), or search on "
        "the device (adaptive_batching.search=extrapolate)."
    )


def _gradients_made() -> int:
    """The allocations of a small backward pass on the fake device that sums three gradients."""
    device = fake_device.device()
    recorder = Recorder(device)
    with FakeTensorMode() as mode, Watch(recorder, mode):
        leaf = torch.empty(1024, device=device, requires_grad=True)
        inner = leaf * 1
        end = (inner * 2 + inner * 3 + inner * 4).sum()
        recorder.take_events()
        end.backward()
    return sum(event.nbytes == leaf.nbytes for event in recorder.take_events().events)
