"""Plans of programs that launch kernels of their own: those of flash attention's packages, and by Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.programs import PROGRAM, STEP, planned, written
from torchtune_adaptive.common import NoPrediction

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

ATTENDS = """
import sys
from importlib.metadata import packages_distributions, version
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input
assert version("flash-attn") == "2.8.3" and packages_distributions()["flash_attn"] == ["flash-attn"]


def in_rows(q, k, v):
    rows, tokens = q.shape[:2]
    mask = torch.ones(rows, tokens, dtype=torch.long, device=q.device)
    mask[:, tokens // 2 :] = 0
    q, places, begins, longest, _ = unpad_input(q, mask)
    k, v = (unpad_input(one, mask)[0] for one in (k, v))
    assert longest == tokens // 2 and begins.diff().tolist() == [longest] * rows
    out = flash_attn_varlen_func(q, k, v, begins, begins, longest, longest, causal=True)
    return pad_input(out, places, rows, tokens)


def by_torch(q, k, v):
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def by_blocks(q, k, v, attend=torch.compile(flex_attention)):
    tokens = q.shape[1]
    mask = torch.compile(create_block_mask)(lambda b, h, i, j: i >= j, 1, 1, tokens, tokens)
    assert mask.kv_num_blocks.sum().item() == 1
    q, *few = (one.transpose(1, 2) for one in (q, k[:, :, :2], v[:, :, :2]))
    return attend(q, *few, block_mask=mask, enable_gqa=True).transpose(1, 2)


def without_compiler(q, k, v):
    return by_blocks(q, k, v, flex_attention)


def in_all_ways(q, k, v):
    few = (one[:, :, :2].contiguous() for one in (k, v))
    out = flash_attn_func(q, *few, causal=True, window_size=(16, 0), softcap=5.0)
    return out + flash_attn_qkvpacked_func(torch.stack((q, k, v), 2)) + in_rows(q, k, v)


def attended(x, how=sys.argv[1]):
    parts = x.unflatten(-1, (4, 4, -1)).unbind(-2)[:3]
    parts = parts if how == "float32" else [one.bfloat16() for one in parts]
    ways = dict(torch=by_torch, all=in_all_ways, flex=by_blocks, plain=without_compiler)
    attend = ways.get(how, flash_attn_func)
    return torch.cat([attend(*parts)] * 4, -1).flatten(2).to(x.dtype)

"""
ATTENDS += PROGRAM.replace("torch.relu(", "attended(")


def allocated(path: Path, *words: str) -> int:
    return planned(path, *words).answers[0].peak.allocated


def test_flash_attention_takes_what_that_of_torch_takes(tmp_path: Path) -> None:
    path = written(tmp_path, text=ATTENDS)
    assert allocated(path, "alone") == pytest.approx(allocated(path, "torch"), rel=0.001)


def test_flash_attention_has_all_its_functions(tmp_path: Path) -> None:
    """Those of packed tensors, rows without padding, windows, and heads that share keys."""
    assert planned(written(tmp_path, text=ATTENDS), "all").answers[0].fits


def test_flash_attention_refuses_what_its_kernels_refuse(tmp_path: Path) -> None:
    with pytest.raises(NoPrediction, match="RuntimeError: FlashAttention only support fp16"):
        planned(written(tmp_path, text=ATTENDS), "float32")


def test_flex_attention_is_planned_where_it_is_compiled(tmp_path: Path) -> None:
    path = written(tmp_path, text=ATTENDS)
    assert allocated(path, "flex") == pytest.approx(allocated(path, "alone"), rel=0.01)
    with pytest.raises(NoPrediction, match=r"flex_attention: .* torch.compile\(flex_attention\)"):
        planned(path, "plain")


LAUNCHES = """
import sys
import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton
from triton.language.extra import libdevice


@triton.jit
def copied(X, Y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < size), mask=at < size)


@triton.jit
def put(P, at, value):
    P += at
    tl.store(P, value)


@triton.jit
def shifted(X, Y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    put(Y, tl.load(X + at), at)


@triton.autotune(configs=[triton.Config(dict(BLOCK=512)), triton.Config(dict(BLOCK=1024))], key=["size"])
@triton.heuristics(dict(EVEN=lambda given: given["size"] % 2 == 0))
@triton.jit
def multiplied(X, Y, size, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(Y, tl.dot(tl.load(X), libdevice.tanh(tl.load(X))))


@triton_op("ours::copy", mutates_args=dict())
def copy(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    wrap_triton(copied)[(triton.cdiv(x.numel(), 512),)](x, out, x.numel(), BLOCK=512)
    return out


class Launched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return copy(x)

    @staticmethod
    def backward(ctx, gradient):
        found = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        assert found.is_cuda and torch.tensor(1, device=found.device).item() == 1
        size = gradient.numel()
        multiplied[lambda how: (triton.cdiv(size, how["BLOCK"]),)](gradient, found, size)
        read, changed = (torch.arange(3, device=found.device) for _ in range(2))
        shifted[1,](read, changed, size, BLOCK=512)
        assert read.tolist() == [0, 1, 2] and str(changed.tolist()) == "[unknown, unknown, unknown]"
        return found


class Cloned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()

"""
LAUNCHES += PROGRAM.replace(
    "torch.relu(", "(Launched if sys.argv[1] == 'triton' else Cloned).apply("
)


def test_kernels_of_triton_take_what_is_allocated_for_them(tmp_path: Path) -> None:
    path = written(tmp_path, STEP, text=LAUNCHES)
    plan = planned(path, "triton")
    assert plan.answers[0].peak.allocated == pytest.approx(allocated(path, "torch"), rel=0.001)
    assert plan.about.uncounted == ("multiplied",)
