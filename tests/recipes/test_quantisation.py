"""Quantisation-aware training is torchtune's, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchtune.training.quantization import Int8DynActInt4WeightQATQuantizer

from tests.helpers.ranks import run_ranks
from tests.helpers.recipes import run_ours, run_torchtunes, saved_weights, tiny_config
from torchtune_adaptive.recipe.upstream import fake_quantisation_for_lora

KINDS = ("qat", "qat_lora")
SMALL: dict[str, Any] = {"batch_size": 2, "max_steps_per_epoch": 3, "epochs": 1}
NONE_AT_FIRST = {"fake_quant_after_n_steps": 2}
ALWAYS = {"fake_quant_after_n_steps": None}


def run_theirs(kind: str, cfg: Any) -> list[dict[str, float]]:
    """As it is, its LoRA recipe stops: torchao's description of fake quantisation has got another class."""
    cls = Int8DynActInt4WeightQATQuantizer
    for name in ("get_activation_fake_quantize_config", "get_weight_fake_quantize_config"):
        described = getattr(cls, name)

        def converted(self: Any, described: Any = described) -> Any:
            return fake_quantisation_for_lora(described(self))

        setattr(cls, name, converted)
    return run_torchtunes(kind, cfg)


def run(kind: str, folder: Path, ranks: int = 1, **changes: Any) -> list[dict[str, float]]:
    cfg = tiny_config(kind, folder, **{**SMALL, **changes})
    records, *_ = run_ranks(run_ours, ranks, kind, cfg, join=False)
    return records


def assert_same_run(kind: str, folder: Path, changes: dict[str, Any], ranks: int) -> None:
    if kind == "qat":
        changes = {**changes, "lr_scheduler": None}  # which torchtune's recipe ignores
    cfg = tiny_config(kind, folder / "theirs", **{**SMALL, **changes})
    theirs, *_ = run_ranks(run_theirs, ranks, kind, cfg, join=False)
    ours = run(kind, folder / "ours", ranks, **changes)
    assert len(theirs) == len(ours) == 3
    for their, our in zip(theirs, ours, strict=True):
        assert our["loss"] == their["loss"]
        assert our["lr"] == their["lr"]
    assert_same_weights(folder / "theirs", folder / "ours")


def assert_same_weights(one: Path, other: Path) -> None:
    expected, found = saved_weights(one), saved_weights(other)
    assert expected.keys() == found.keys() and expected
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name


@pytest.mark.parametrize(("kind", "changes"), [("qat", NONE_AT_FIRST), ("qat_lora", ALWAYS)])
def test_two_ranks_train_as_with_torchtune(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_run(kind, tmp_path, changes, ranks=2)


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
    assert_same_run(kind, tmp_path, {**ALWAYS, **changes}, ranks)


@pytest.mark.parametrize("kind", ["qat", pytest.param("qat_lora", marks=pytest.mark.exhaustive)])
def test_quantising_begins_when_it_should(kind: str, tmp_path: Path) -> None:
    after = [run(kind, tmp_path / str(n), fake_quant_after_n_steps=n) for n in (0, 2, 3)]
    at_once, later, never = ([record["loss"] for record in records] for records in after)
    assert at_once == [each["loss"] for each in run(kind, tmp_path / "null", **ALWAYS)]
    assert at_once[0] != later[0]
    assert later[:2] == never[:2] and later[2] != never[2]


def refused(kind: str, folder: Path, **changes: Any) -> str:
    with pytest.raises(AssertionError, match="ConfigError: ") as raised:
        run(kind, folder, **changes)
    return str(raised.value)


QUANTIZERS = "torchtune.training.quantization"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "qat",
            {"quantizer": {"_component_": f"{QUANTIZERS}.Int8DynActInt4WeightQuantizer"}},
            "is not a quantizer for training",
        ),
        ("qat", {"quantizer.groupsize": 256}, "quantises no layer of the model"),
        ("qat_lora", {"quantizer.groupsize": 256}, "does not fit the model"),
        ("qat_lora", {"model.use_dora": True}, "cannot be combined with quantisation-aware"),
        ("qat", {"compile": True}, "cannot be combined with quantisation-aware"),
    ],
)
def test_what_cannot_work_stops_in_one_line(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in refused(kind, tmp_path, **changes)
