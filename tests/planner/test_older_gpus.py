"""GPUs older than Ampere, which have no FlashAttention: what attention takes on them, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from tests.helpers.recipes import tiny_config
from torchtune_adaptive.cli import page_choices
from torchtune_adaptive.planner import call_alone, gpu_limits, gpus
from torchtune_adaptive.planner.trace import kernels
from torchtune_adaptive.planner.trace.recorder import Recorder, Watch
from torchtune_adaptive.recipe import compare, on_devices
from torchtune_adaptive.recipe.plan.request import PlanRequest, plan_request

ROWS, HEADS, LENGTH, WIDTH = 2, 8, 512, 64
SCORES = ROWS * HEADS * LENGTH * LENGTH
MARK = 28
"""Bytes that are allocated between the forward and the backward pass, and never else."""


def forward_and_backward(
    attention: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    kv_heads: int,
    mark: Callable[[], Any],
) -> None:
    def made(heads: int) -> torch.Tensor:
        return torch.ones(ROWS, heads, LENGTH, WIDTH, dtype=dtype, requires_grad=True)

    query, key, value = made(HEADS), made(kv_heads), made(kv_heads)
    result = attention(query, key, value, is_causal=True, enable_gqa=kv_heads != HEADS)
    marked = mark()
    result.backward(torch.ones_like(result))
    del marked


def peaks(events: list[int]) -> tuple[int, int, int]:
    """The bytes at the peak of the forward pass, after it, and at the peak of the backward pass, from what is
    allocated and freed."""
    totals = [sum(events[: n + 1]) for n in range(len(events))]
    middle = events.index(MARK)
    return max(totals[:middle]), totals[middle - 1], max(totals[middle:])


def measured(dtype: torch.dtype, kv_heads: int) -> tuple[int, int, int]:
    """What torch's own function takes on a CPU."""
    math = torch.ops.aten._scaled_dot_product_attention_math

    def attention(*inputs: torch.Tensor, **how: Any) -> torch.Tensor:
        result: torch.Tensor = math(*inputs, None, 0.0, **how)[0]
        return result

    def run() -> None:
        mark = partial(torch.empty, MARK, dtype=torch.uint8)
        forward_and_backward(attention, dtype, kv_heads, mark)

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    kinds = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    seen = sorted((one.start_ns(), one.nbytes()) for one in kinds if one.name() == "[memory]")
    return peaks([nbytes for _, nbytes in seen])


def traced(dtype: torch.dtype, kv_heads: int) -> tuple[int, int, int]:
    recorder = Recorder(torch.device("cpu"))
    recorder.listening, recorder.simulated = True, False
    with FakeTensorMode() as mode, Watch(recorder, mode):
        attention = partial(kernels.attention, True)
        mark = partial(torch.empty, MARK, dtype=torch.uint8)
        forward_and_backward(attention, dtype, kv_heads, mark)
    sizes: dict[int, int] = {}
    events = []
    for block, nbytes, _ in recorder.take_events().events:
        events.append(sizes.setdefault(block, nbytes) if nbytes >= 0 else -sizes[block])
    return peaks(events)


@pytest.mark.parametrize(
    ("dtype", "kv_heads"), [(torch.float16, 2), (torch.bfloat16, 2), (torch.bfloat16, HEADS)]
)
def test_where_scores_are_written_they_take_what_torch_takes(
    dtype: torch.dtype, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A kernel of CUDA's takes this.
    monkeypatch.delitem(kernels.WORKSPACES, torch.ops.aten._softmax_backward_data.default)
    found = traced(dtype, kv_heads)
    assert found == pytest.approx(measured(dtype, kv_heads), abs=64)
    assert found[0] > 9 * SCORES and found[1] > 4 * SCORES


def test_float16_takes_no_scores_where_each_head_has_its_keys() -> None:
    assert max(traced(torch.float16, HEADS)) < 4 * SCORES


@pytest.mark.parametrize(
    ("name", "older"),
    [
        *((name, True) for name in ("Tesla T4", "v100", "rtx8000-48gb", "2080ti")),
        *((name, False) for name in ("a100-40gb", "rtx3090", "mi210-64gb", "something")),
    ],
)
def test_which_gpus_are_older(name: str, older: bool) -> None:
    assert gpus.is_before_ampere(name) == older
    kind = gpus.gpu(gpus.known(name) or gpus.DEFAULT)
    measured, _ = gpu_limits(name, kind, 1, 1 << 34, 0.05, "as measured")
    assert measured.before_ampere == older


def request(gpu: str, **changes: Any) -> PlanRequest:
    cfg = tiny_config("full", "unused", device="cuda", dtype="bf16", **changes)
    return plan_request(cfg, 1, gpu, length=512)


@pytest.mark.parametrize(("gpu", "said"), [("a100-40gb", "flash; if"), ("v100-16gb", "GPUs older")])
def test_plans_of_configs_say_which_attention_is_planned(gpu: str, said: str) -> None:
    [line] = (line for line in request(gpu).assumptions if line.startswith("attention: "))
    assert said in line


@pytest.mark.alternating
def test_configs_are_compared_with_each_gpus_own_steps() -> None:
    plan = request("a100-40gb", batch_size=8)
    devices = on_devices(plan, "a100-40gb,t4-16gb,a100-80gb")
    new, old, other = call_alone(compare, plan.query(), devices, timeout=300)
    assert new.peak.allocated == other.peak.allocated < old.peak.allocated
    again = call_alone(compare, plan.query(device=devices[1][0]), devices[1:2], timeout=300)
    assert again[0].peak == old.peak


def test_pages_have_gpus_of_one_kind() -> None:
    assert page_choices.offered_gpus("t4-16gb", ("v100-16gb", "a100-40gb")) == (
        "t4-16gb",
        "v100-16gb",
    )
    assert "t4-16gb" not in page_choices.offered_gpus("a100-40gb", ("t4-16gb", "h100-80gb"))
    said = page_choices.not_offered(False, "t4-16gb,h100-80gb,here")
    assert len(said) == 1 and said[0].startswith("t4-16gb: GPUs older than Ampere")
    assert not page_choices.not_offered(True, None)
