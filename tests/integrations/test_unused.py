"""Parameters that some rows do not use: ranks have gradients of the same, and none of those nobody uses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.core import Ranks
from torchtune_adaptive.integrations.unused import Unused


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ("always", "on_one_rank", "hidden", "never")
        self.layers = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})

    def forward(self, inputs: torch.Tensor, marked: bool) -> torch.Tensor:
        hidden = self.layers["always"](inputs)
        if marked:
            hidden = self.layers["on_one_rank"](hidden)
        loss: torch.Tensor = checkpoint(self.layers["hidden"], hidden, use_reentrant=True).sum()
        return loss


def gradients(looks: bool) -> dict[str, bool | None]:
    """Of each layer: whether it has a gradient, and whether that is other than zero."""
    torch.manual_seed(0)
    model = Model()
    wrapped = DistributedDataParallel(model, find_unused_parameters=looks)
    unused = Unused(wrapped)
    with wrapped.no_sync():
        for micro_batch in range(2):
            marked = dist.get_rank() == micro_batch == 1
            unused.joined(wrapped(torch.ones(3, 2), marked)).backward()
    if looks:
        for layer in model.layers.values():
            dist.all_reduce(layer.weight.grad)  # type: ignore[union-attr]
    unused.settle(Ranks())
    return {
        name: None if layer.weight.grad is None else bool(layer.weight.grad.any())
        for name, layer in model.layers.items()
    }


@pytest.mark.ranks
def test_ranks_have_gradients_of_the_same_parameters() -> None:
    expected = {"always": True, "on_one_rank": True, "hidden": True, "never": None}
    assert run_ranks(gradients, 2, True) == [expected] * 2
    one, other = run_ranks(gradients, 2, False)
    assert one["on_one_rank"] is None and other["on_one_rank"], "as the model has been told"


def test_without_ranks_there_is_nothing_to_do() -> None:
    model = Model()
    loss = model(torch.ones(3, 2), marked=False)
    assert Unused(model).joined(loss) is loss
