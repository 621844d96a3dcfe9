"""Models and optimizers that accelerate or Lightning Fabric has prepared, or that are on a device of many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from tests.helpers.decoder import local_values, same_bits
from tests.helpers.library import Trained, collate, rows_of, tiny_model
from torchtune_adaptive import AdaptiveStep
from torchtune_adaptive.library import checks
from torchtune_adaptive.library.private import FakeTensorMode


def by_accelerate(optimizer: Optimizer, scaler: GradScaler) -> Any:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)  # whose state it asks for
    return AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)


def by_fabric(optimizer: Optimizer, scaler: GradScaler) -> Any:
    pytest.importorskip("lightning_fabric")
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    return Fabric(accelerator="cpu", devices=1, plugins=plugin).setup_optimizers(optimizer)


@pytest.mark.parametrize("prepare", [by_accelerate, by_fabric])
def test_the_scaler_of_a_prepared_optimizer_is_taken(
    prepare: Callable[[Optimizer, GradScaler], Any],
) -> None:
    """A gradient that overflows lowers its scale, and the optimizer does not step."""
    scaler, model = GradScaler("cpu", init_scale=2.0**100), tiny_model("alone")
    optimizer = prepare(torch.optim.SGD(model.parameters(), lr=0.1), scaler)
    step = AdaptiveStep(
        model, optimizer, lambda batch: (model(batch[0]).square().sum() * 2.0**40, 1)
    )
    before = local_values(model)
    outcome = step(rows_of(4), collate, 2)
    assert outcome.overflow and scaler.get_scale() == 2.0**99
    assert same_bits(local_values(model), before)


def test_another_scaler_may_be_passed_and_none_where_the_caller_steps() -> None:
    model, theirs, own = tiny_model("alone"), GradScaler("cpu"), GradScaler("cpu")
    optimizer = by_accelerate(torch.optim.SGD(model.parameters(), lr=0.1), theirs)

    def scaler_of(**settings: Any) -> GradScaler | None:
        step = AdaptiveStep(model, optimizer, lambda batch: None, **settings)  # type: ignore[arg-type, return-value]
        return step.train_step.options.scaler

    assert scaler_of(scaler=own) is own
    assert scaler_of(optimizer_steps=False) is None  # whose forward scales the loss


def test_an_optimizer_without_a_scaler_has_none() -> None:
    assert Trained("alone").step.train_step.options.scaler is None


def test_batches_go_to_the_device_that_the_model_is_on() -> None:
    """Also where no ``set_device`` was called. A fake device needs no hardware."""
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.empty(2, device="cuda:1")])
    assert checks.device_of(model) == torch.device("cuda", 1)
    assert checks.device_of(tiny_model("alone")) == torch.device("cpu")
