"""Trainers that are resumed on another number of processes: the steps are those of an undisturbed run."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    Loss,
    lose_memory,
    make,
    on_ranks,
    result,
)
from tests.integrations.real.ways import settings_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 2e-6
STEPS = 9
SETTINGS = {
    **{"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1},
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}


class Ending(TrainerCallback):  # type: ignore[misc]
    """Ends training after a step, as if it were killed after its checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def part(
    kind: str, way: str, folder: str, ends: int, resume: str | None, loss: Loss | None = None
) -> dict[str, Any]:
    """A part of a run: what each step has logged, and this process's rows of it."""
    settings = settings_of(kind, way) if kind in ("trainer", "sft", "dpo", "reward") else {}
    settings |= SETTINGS | {"callbacks": [Ending(ends)]}
    settings.pop("eval_strategy", None)
    if way == "fsdp2":
        settings["fsdp_config"] = {
            **settings["fsdp_config"],
            "state_dict_type": "SHARDED_STATE_DICT",
        }
    trainer = make(kind, AS_CONFIGURED, folder, **settings)
    take, steps = trainer.get_batch_samples, []

    def seen(*given: Any) -> Any:
        samples = take(*given)
        rows = chain(*(batch.rows for batch in trainer._adaptive_rows))
        steps.append(
            [str(sorted((name, str(value)) for name, value in row.items())) for row in rows]
        )
        return samples

    trainer.get_batch_samples = seen
    left = lose_memory(trainer, loss) if loss else lambda: 0
    trainer.train(resume_from_checkpoint=resume)
    assert not left()
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
    logs = [entry for entry in result(trainer).logs if "loss" in entry]
    first = int(resume.rpartition("-")[2]) if resume else 0
    return {
        "logs": [
            [entry[name] for name in ("loss", "grad_norm", "learning_rate")] for entry in logs
        ],
        "rows": steps,
        "sizes": {entry["adaptive/micro_batch"] for entry in logs[first:]},
        "weights": result(trainer).weights.tolist(),
    }


def whole_steps(parts: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of each step on all processes."""
    return [sorted(chain(*one)) for one in zip(*(each["rows"] for each in parts), strict=True)]


@pytest.mark.parametrize(
    ("kind", "way"),
    [("trainer", "ddp"), ("sft", "ddp"), ("dpo", "ddp"), ("reward", "ddp"), ("trainer", "fsdp2")],
)
def test_a_run_goes_on_on_other_processes(kind: str, way: str, tmp_path: Path) -> None:
    undisturbed = on_ranks(part, 2, kind, way, str(tmp_path / "whole"), STEPS, None)
    folder, resume = str(tmp_path), None
    rows: list[list[str]] = []
    others = 1 if way == "ddp" else 4  # transformers has no FSDP on one process
    for processes, ends in ((2, 3), (others, 6), (2, STEPS)):
        loss = Loss(4, 0, 2) if processes == others else None
        seen = on_ranks(part, processes, kind, way, folder, ends, resume, loss)
        rows += whole_steps(seen)
        assert max(seen[0]["sizes"]) <= 4, "one that is not searched for stays what it was"
        resume = f"{folder}/checkpoint-{ends}"
    assert rows == whole_steps(undisturbed)
    logs, expected = (torch.tensor(each[0]["logs"]) for each in (seen, undisturbed))
    assert logs.shape == expected.shape == (STEPS, 3)
    weights = (torch.tensor(each[0]["weights"]) for each in (seen, undisturbed))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)
    torch.testing.assert_close(logs[:, 0], expected[:, 0], rtol=0, atol=CLOSE)
    torch.testing.assert_close(logs, expected, rtol=1e-5, atol=CLOSE)
