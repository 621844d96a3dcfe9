"""What a checkpoint says of training: read as it was written, by this version or an earlier one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.earlier import GENERATORS, UNNUMBERED
from torchtune_adaptive.common.errors import CheckpointError
from torchtune_adaptive.core.sizes.recovery import Recovery
from torchtune_adaptive.core.step.generators import Generators
from torchtune_adaptive.recipe.checkpoints.progress import TRAINING_KEY, Progress
from torchtune_adaptive.recipe.checkpoints.training_state import VERSION, TrainingState


def test_a_state_without_a_version_is_read_whole_and_written_with_one() -> None:
    state = TrainingState.read(UNNUMBERED)
    assert (state.global_step, state.validated, state.samples_of_epoch) == (6, 5, 64)
    assert (state.growth.start, state.growth.largest) == ([16, 1, 2], 16)
    knobs = {
        "adaptive_batching.activation_checkpointing": "none",
        "fsdp_reshard_after_forward": True,
    }
    written = state.write()
    for found, saved in zip(written["generators"], UNNUMBERED["generators"], strict=True):
        Generators(torch.device("cpu")).load_bytes(found)
        version, words, normal = random.getstate()
        assert [version, [*words], normal] == saved["python"]
        numpy = np.random.get_state(legacy=False)
        assert {**numpy, "state": {**numpy["state"], "key": [*numpy["state"]["key"]]}} == saved[
            "numpy"
        ]
        assert torch.equal(torch.get_rng_state(), saved["torch"])
    rest = {**written, "generators": UNNUMBERED["generators"]}
    assert rest == {**UNNUMBERED, "version": VERSION, "knobs": knobs}
    assert TrainingState.read(written) == state


def test_the_first_release_had_fewer_values() -> None:
    gave_up = {**UNNUMBERED["recovery"], "size": 2, "given_up": [4], "calm": 97}
    del gave_up["relief"]
    old = {**UNNUMBERED, "recovery": gave_up}
    del old["knobs"], old["validated"]
    state = TrainingState.read(old)
    assert (state.knobs, state.validated) == (None, 6)
    resumed = Recovery(4, [1, 2], calm_steps=9, reliefs=1)
    resumed.load_state_dict(state.recovery or {})
    assert (resumed.size, resumed.relief) == (2, 0)
    assert [resumed.grow_back() for _ in range(3)] == [False, False, True] and resumed.size == 4


def test_a_newer_version_is_refused() -> None:
    newer = {**UNNUMBERED, "version": VERSION + 1, "unheard_of": 1}
    with pytest.raises(CheckpointError, match=f"version {VERSION + 1}, .* reads up to {VERSION}"):
        TrainingState.read(newer)


@pytest.mark.parametrize("key", UNNUMBERED.keys() - {"knobs", "validated"})
def test_a_damaged_state_says_what_is_wrong(key: str) -> None:
    without = {name: value for name, value in UNNUMBERED.items() if name != key}
    with pytest.raises(CheckpointError, match=f"damaged .*{key}.*from another checkpoint"):
        TrainingState.read(without)


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        {},
        {**UNNUMBERED, "growth": {}},
        {**UNNUMBERED, "growth": None},
        {**UNNUMBERED, "recovery": {"size": 1}},
        {**UNNUMBERED, "version": "new"},
        {**UNNUMBERED, "unheard_of": 1},
        {**UNNUMBERED, "generators": [{"torch": torch.get_rng_state()}]},
        {**UNNUMBERED, "generators": [{**GENERATORS, "python": [3, [7] * 9, None]}]},
        {**UNNUMBERED, "version": 2},
        {**UNNUMBERED, "version": 2, "generators": torch.zeros(3)},
    ],
)
def test_so_does_one_that_is_something_else(damaged: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"is damaged \(.*\)\. Resume from another checkpoint"
    ):
        TrainingState.read(damaged)


def test_the_recipe_state_of_torchtune_has_none() -> None:
    theirs = {"epochs_run": 1, "seed": 1, "max_steps_per_epoch": None, "total_epochs": 2}
    progress = Progress(1, 2, None)
    progress.resume(theirs)
    assert progress.training is None and progress.training_state()[TRAINING_KEY] is None
    progress.resume({**theirs, TRAINING_KEY: UNNUMBERED})
    assert progress.training_state()[TRAINING_KEY]["global_step"] == 6
