"""Operations of libraries that have their kernels for GPUs in Python, and tensors of kinds of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.programs import planned, written

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

DEFINED = """
torch.library.define("ours::product", "(Tensor left, Tensor right) -> Tensor")


@torch.library.register_fake("ours::product")
def _(left, right):
    raise AssertionError("a kernel is there")


@torch.library.register_kernel("ours::product", "cuda")
def _(left, right):
    assert left.device.type == "cuda" and left.data_ptr() != right.data_ptr()
    widened = torch.empty({wide}, *right.shape, device=left.device)
    return left @ widened[0]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right):
        ctx.right = right
        return torch.ops.ours.product(left, right)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.right.t(), None


class Codes(nn.Parameter):
    def __new__(cls, data):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scale = 1
        return made

    def to(self, *arguments, **options):
        self.data = self.data.to(torch.float16).to(*arguments, **options)
        return self


with torch.device("meta"):
    codes = torch.randn({width}, 100)
codes = Codes(torch.zeros_like(codes, device="cuda")).to("cuda")
assert isinstance(codes, Codes) and codes.scale == 1 and codes.dtype == torch.float16
model.head.forward = lambda x: Product.apply(x, codes.float())
"""


def test_what_a_kernel_takes_besides_its_result_is_seen(tmp_path: Path) -> None:
    few, many = (
        planned(written(tmp_path, before=DEFINED.format(wide=wide, width=256)), rows=64)
        for wide in (1, 1000)
    )
    one, other = (plan.answers[0].peak.allocated for plan in (few, many))
    assert other - one > 500 * 256 * 100 * 4
