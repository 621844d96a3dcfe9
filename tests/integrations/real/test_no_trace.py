"""What a search leaves (nothing), and what a checkpoint keeps (all that was learned)."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    Loss,
    distance,
    make,
    on_ranks,
    result,
    trained,
)
from tests.integrations.real.ways import CASES, WAYS, everything, settings_of
from torchtune_adaptive.integrations.trainer_step import TrainerStep

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6


def around_the_search(kind: str) -> dict[str, Any]:
    search = TrainerStep._search
    seen: dict[str, Any] = {}

    def watched(self: TrainerStep, *args: Any, **named: Any) -> int:
        before, log = everything(self._trainer), list(self._trainer.state.log_history)
        size = search(self, *args, **named)
        after = everything(self._trainer)
        for one, other in zip(before[0], after[0], strict=True):
            assert torch.equal(one, other)
        assert before[1:] == after[1:] and log == self._trainer.state.log_history
        seen["size"] = size
        return size

    TrainerStep._search = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        # Attention dropout draws random numbers in each forward pass.
        make(kind, SEARCHING, folder, config={"attention_dropout": 0.1}).train()
    return seen


@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo", "grpo", "rloo"])
def test_a_search_leaves_no_trace(kind: str) -> None:
    [seen] = on_ranks(around_the_search, 1, kind)
    assert seen["size"] == 8


def resumed(way: str, folder: str, name: str) -> dict[str, Any]:
    """Training that is ended after two steps and resumed, beside training that is not."""
    kind = name.partition(",")[0]
    known = name in CASES and way in WAYS
    settings = settings_of(name, way) if known else WAYS.get(way, {})
    settings = settings | {"max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
    if way == "fsdp2":
        # accelerate loads a full state dict on rank 0 by way of a device that a CPU is not.
        settings["fsdp_config"] = settings["fsdp_config"] | {
            "state_dict_type": "SHARDED_STATE_DICT"
        }
    lost = [Loss(1, 0, 2)]
    if kind == "grpo":
        lost.append(Loss(0, 0, 1, "generation"))
    whole = trained(kind, AS_CONFIGURED, lost, folder=folder, **settings)
    rest = trained(
        kind,
        AS_CONFIGURED,
        resume=f"{folder}/checkpoint-2",
        folder=folder,
        restore_callback_states_from_checkpoint=way == "alone",
        **settings,
    )
    state = json.loads((Path(folder) / "checkpoint-2/trainer_state.json").read_text())
    return {
        "distance": distance(rest, whole),
        "weights": float((rest.weights - whole.weights).abs().max()),
        "sizes": (whole.sizes, rest.sizes),
        "state": state["stateful_callbacks"]["AdaptiveState"],
    }


@pytest.mark.parametrize(
    ("name", "way", "ranks"),
    [
        ("trainer", "alone", 1),
        ("trainer", "ddp", 2),
        ("trainer", "fsdp2", 2),
        ("sft, padding-free", "ddp", 2),
        ("sft, padding-free", "fsdp2", 2),
        ("dpo, lora", "ddp", 2),
        ("grpo", "ddp", 2),
    ],
)
def test_a_resumed_run_goes_on_as_it_would_have(
    name: str, way: str, ranks: int, tmp_path: Path
) -> None:
    for seen in on_ranks(resumed, ranks, way, str(tmp_path), name):
        assert seen["distance"] <= CLOSE and seen["weights"] <= CLOSE, seen
        assert seen["sizes"][0] == seen["sizes"][1] == (4, 2), seen
        learned = seen["state"]["attributes"]["learned"]
        assert learned["size"] == 4
        if name == "grpo":
            assert learned["phases"]["generation"]["size"] == 8
            assert learned["phases"]["generation"]["recovery"]["size"] == 4


def after_the_plain_trainer(folder: str) -> list[bool]:
    """Whether ours, resumed from a checkpoint of the plain trainer, ends as that does."""
    settings: dict[str, Any] = {"save_steps": 2, "save_strategy": "steps"}
    whole = trained("trainer", None, folder=folder, **settings)
    checkpoint = f"{folder}/checkpoint-2"
    results = []
    for restores in (False, True):
        more = settings | {"restore_callback_states_from_checkpoint": restores}
        results.append(trained("trainer", AS_CONFIGURED, resume=checkpoint, folder=folder, **more))
    again = trained(
        "trainer", AS_CONFIGURED, resume=f"{folder}/checkpoint-4", folder=folder, **settings
    )
    same = [torch.equal(each.weights, whole.weights) for each in (*results, again)]
    return [*same, *(each.without_times() == whole.without_times() for each in results)]


def test_a_checkpoint_of_the_plain_trainer_is_resumed(tmp_path: Path) -> None:
    assert on_ranks(after_the_plain_trainer, 1, str(tmp_path)) == [[True] * 5]


def searched_again() -> list[Any]:
    """Whether a resumed run searches: with the options that it had, and with others."""
    search, sizes = TrainerStep._search, []

    def watched(self: TrainerStep, *args: Any, **named: Any) -> int:
        sizes.append(search(self, *args, **named))
        return sizes[-1]

    TrainerStep._search = watched  # type: ignore[method-assign]
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"save_steps": 2, "save_strategy": "steps", "folder": folder}
        trained("trainer", SEARCHING, **settings)
        counts.append(len(sizes))
        for ceiling in (None, 2):
            options = replace(SEARCHING, ceiling=ceiling)
            trained("trainer", options, resume=f"{folder}/checkpoint-2", **settings)
            counts.append(len(sizes))
    return [counts, sizes]


def test_a_resumed_run_searches_only_where_something_has_changed() -> None:
    assert on_ranks(searched_again, 1) == [[[1, 1, 2], [8, 2]]]


def trained_twice() -> float:
    """The distance of ours from the plain trainer in a second call of train()."""
    results = []
    for options in (None, AS_CONFIGURED):
        with tempfile.TemporaryDirectory() as folder:
            trainer = make("trainer", options, folder)
            next(iter(trainer.get_train_dataloader()))["input_ids"]  # somebody looks at a batch
            trainer.train()
            trainer.train()
            results.append(result(trainer))
    return distance(results[1], results[0])


def test_a_trainer_may_train_twice() -> None:
    assert on_ranks(trained_twice, 1) == [0]
