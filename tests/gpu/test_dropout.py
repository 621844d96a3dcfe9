"""Dropout by sample on a real device: compiled to one kernel there, it drops what a CPU drops in parts."""

from __future__ import annotations

import pytest
import torch

from torchtune_adaptive.core.step.sample_dropout import SampleDropout, drop_by_kernel, drop_in_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, WIDTH = 3, 320


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_device_drops_what_a_cpu_does(share: float, dtype: torch.dtype) -> None:
    compiled = drop_by_kernel()
    keys = torch.randint(-(1 << 31), (1 << 31) - 1, (ROWS, 2), dtype=torch.int32)
    for length in (1, 100, 129):
        rows = torch.randn(ROWS, length, WIDTH, dtype=dtype)
        found = []
        for device, way in (("cpu", drop_in_parts), ("cuda", drop_in_parts), ("cuda", compiled)):
            layer = SampleDropout(share, way)
            layer.row_keys = keys.to(device)
            x = rows.detach().to(device).requires_grad_()
            kept = layer(x)
            kept.backward(torch.ones_like(kept))
            found.append((kept.detach().cpu(), x.grad.cpu()))  # type: ignore[union-attr]
        for mine in found[1:]:
            assert all(map(torch.equal, mine, found[0]))
