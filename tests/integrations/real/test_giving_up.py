"""Where memory runs out and less of it is not to be had as usual: a single row, a model that cannot be
checkpointed; and what is left on the model after training."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import pytest

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    Loss,
    distance,
    llama,
    lose_memory,
    make,
    on_ranks,
    result,
    tokens,
    trained,
)
from torchtune_adaptive import TrainingOutOfMemory
from torchtune_adaptive.core.step import phase, retry
from torchtune_adaptive.integrations import Adaptive

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-5
ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}


def with_prefix() -> Any:
    from peft import PrefixTuningConfig, get_peft_model

    model = llama(use_cache=True)
    return get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def prefix_tuned() -> dict[str, Any]:
    one_batch = {"gradient_accumulation_steps": 1}
    plain = trained("trainer", None, model=with_prefix(), **one_batch)
    lost = trained("trainer", AS_CONFIGURED, Loss(times=1), model=with_prefix(), **one_batch)
    return {"far": distance(lost, plain), "sizes": lost.sizes}


@pytest.mark.parametrize("ranks", [1, 2])
def test_prefix_tuning_which_cannot_be_checkpointed_is_halved(ranks: int) -> None:
    for seen in on_ranks(prefix_tuned, ranks):
        assert seen["far"] <= CLOSE and seen["sizes"] == (4, 2), seen


def waits() -> dict[str, Any]:
    waited: dict[str, list[float]] = {"step": [], "evaluation": []}
    settings = ONE_ROW | {"eval_dataset": tokens(4), "per_device_eval_batch_size": 1}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(retry.time, "sleep", waited["step"].append),
    ):
        trainer = make("trainer", Adaptive(search=False), folder, **settings)
        left = lose_memory(trainer, Loss(times=3))  # once more than checkpointing helps
        trainer.train()
        lost = result(trainer)
        layer, losses = trainer.model.model.layers[1], 2

        def lose(*_: Any) -> None:
            nonlocal losses
            losses -= 1
            if losses >= 0:
                import torch

                raise torch.OutOfMemoryError("CUDA out of memory (injected)")

        layer.register_forward_pre_hook(lose)
        with mock.patch.object(phase.time, "sleep", waited["evaluation"].append):
            trainer.evaluate()
    plain = trained("trainer", None, **ONE_ROW)
    return {"waited": waited, "left": left(), "far": distance(lost, plain)}


def test_a_single_row_waits_for_memory() -> None:
    [seen] = on_ranks(waits, 1)
    # The first wait is a second, and each other one as long as all before it.
    assert seen["waited"] == {"step": [1.0, 1.0], "evaluation": [1.0, 1.0]}, seen
    assert seen["left"] == 0 and seen["far"] <= CLOSE, seen


def without_waiting() -> str:
    with pytest.raises(TrainingOutOfMemory) as error:
        trained("trainer", Adaptive(search=False, wait_for_memory=0), Loss(times=2), **ONE_ROW)
    return str(error.value)


def test_nothing_smaller_is_advised_for_a_single_row() -> None:
    [said] = on_ranks(without_waiting, 1)
    assert "shorter rows" in said and "smaller" not in said and "\n" not in said


def left_on_model() -> dict[str, list[Any]]:
    found = {}
    ways: dict[str, tuple[Adaptive, dict[str, Any]]] = {
        "recovered": (AS_CONFIGURED, {}),
        "its own": (AS_CONFIGURED, {"gradient_checkpointing": True}),
        "fastest": (Adaptive(memory_limit=SEARCHING.memory_limit, fastest=True), {}),
    }
    for name, (options, settings) in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = make("trainer", options, folder, **settings)
            layers, embeddings = trainer.model.model.layers, trainer.model.get_input_embeddings()
            attempts: list[bool] = []
            layers[0].register_forward_pre_hook(
                lambda layer, _, attempts=attempts: attempts.append(layer.gradient_checkpointing)
            )
            lose_memory(trainer, Loss(step=1 if options.fastest else 0))
            trainer.train()
            checkpointed = [layer.gradient_checkpointing for layer in layers]
            found[name] = [checkpointed, len(embeddings._forward_hooks), attempts]
    return found


def test_checkpointing_and_hooks_are_as_before_after_training() -> None:
    [found] = on_ranks(left_on_model, 1)
    assert found["recovered"][:2] == [[False, False], 0]
    assert found["its own"][:2] == [[True, True], 1]  # as the plain trainer leaves them
    assert found["fastest"][:2] == [[False, False], 0]
    # After the first look: the attempt, with checkpointing, and in halves with it.
    *_, first, second, third = found["recovered"][2][: found["recovered"][2].index(True) + 2]
    assert (first, second, third) == (False, True, True)
