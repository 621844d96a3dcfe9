"""Quantisation-aware training is torchtune's, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchtune.training.quantization import Int8DynActInt4WeightQATQuantizer

from tests.helpers.recipes import run_torchtunes
from tests.helpers.runs import Records, assert_torchtunes, losses, refused, train
from torchtune_adaptive.recipe.upstream import fake_quantization_for_lora

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

KINDS = ("qat", "qat_lora")
SMALL: dict[str, Any] = {"batch_size": 2}
NONE_AT_FIRST = {"fake_quant_after_n_steps": 2}
ALWAYS = {"fake_quant_after_n_steps": None}


def run_theirs(kind: str, cfg: Any) -> Records:
    """As it is, its LoRA recipe stops: torchao's description of fake quantisation has got another class."""
    cls = Int8DynActInt4WeightQATQuantizer
    for name in ("get_activation_fake_quantize_config", "get_weight_fake_quantize_config"):
        described = getattr(cls, name)

        def converted(self: Any, described: Any = described) -> Any:
            return fake_quantization_for_lora(described(self))

        setattr(cls, name, converted)
    return run_torchtunes(kind, cfg)


def assert_is_torchtunes(kind: str, folder: Path, changes: dict[str, Any], ranks: int) -> None:
    if kind == "qat":
        changes = {**changes, "lr_scheduler": None}  # which torchtune's recipe ignores
    assert_torchtunes(kind, folder, {**SMALL, **changes}, ranks, run_theirs=run_theirs)


@pytest.mark.rotating
@pytest.mark.parametrize(("kind", "changes"), [("qat", NONE_AT_FIRST), ("qat_lora", ALWAYS)])
def test_two_ranks_train_as_with_torchtune(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert_is_torchtunes(kind, tmp_path, changes, ranks=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "bf16"}, {"enable_activation_checkpointing": True}],
    ids=["fp32", "bf16", "checkpointed"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_torchtunes(
    kind: str, changes: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    assert_is_torchtunes(kind, tmp_path, {**ALWAYS, **changes}, ranks)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", KINDS)
def test_quantising_begins_when_it_should(kind: str, tmp_path: Path) -> None:
    def losses_with(n: int | None) -> list[float]:
        return losses(train(kind, tmp_path / str(n), **SMALL, fake_quant_after_n_steps=n))

    at_once, later, never = map(losses_with, (0, 2, 3))
    assert at_once == losses_with(None)
    assert at_once[0] != later[0]
    assert later[:2] == never[:2] and later[2] != never[2]


QUANTIZERS = "torchtune.training.quantization"


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "qat",
            {"quantizer": {"_component_": f"{QUANTIZERS}.Int8DynActInt4WeightQuantizer"}},
            "is not a quantizer for training",
        ),
        ("qat", {"quantizer.groupsize": 256}, "quantizes no layer of the model"),
        ("qat_lora", {"quantizer.groupsize": 256}, "does not fit the model"),
        ("qat_lora", {"model.use_dora": True}, "cannot be combined with quantization-aware"),
        ("qat", {"compile": True}, "cannot be combined with quantization-aware"),
    ],
)
def test_what_cannot_work_stops_in_one_line(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in refused("ConfigError", kind, tmp_path, **SMALL, **changes)
