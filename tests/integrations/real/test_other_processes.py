"""Trainers that are resumed on another number of processes: the steps are those of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    NAMES,
    SEARCHING,
    Loss,
    Result,
    apart,
    assert_near,
    lora,
    lose_memory,
    make,
    on_ranks,
    result,
    texts,
    tokens,
)
from tests.integrations.real.ways import settings_of
from torchtune_adaptive.integrations import Adaptive

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
    kind: str,
    way: str,
    folder: str,
    ends: int,
    resume: str | None,
    loss: Loss | None = None,
    options: Adaptive = AS_CONFIGURED,
    count: int = 64,
    **more: Any,
) -> dict[str, Any]:
    """A part of a run: what each step has logged, and this process's rows of it."""
    settings = settings_of(kind, way) if kind in ("trainer", "sft", "dpo", "reward") else {}
    settings |= SETTINGS | {"callbacks": [Ending(ends)]} | more
    settings["data"] = tokens(count) if kind == "trainer" else texts(*NAMES[kind], count=count)
    settings.pop("eval_strategy", None)
    if way == "fsdp2":
        settings["fsdp_config"] = {
            **settings["fsdp_config"],
            "state_dict_type": "SHARDED_STATE_DICT",
        }
    trainer = make(kind, options, folder, **settings)
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
    args, batches = trainer.args, settings["gradient_accumulation_steps"]
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, batches)
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


BY_SAMPLE = replace(AS_CONFIGURED, dropout="sample")
DROPS = {"lora_dropout": 0.3, "init_lora_weights": False}
NOT_FULL: dict[str, tuple[str, str, tuple[int, int], int, Adaptive, dict[str, Any]]] = {
    # Of 6 rows in the last step, accelerate makes 8 on several processes, and leaves 6 on one.
    "repeats": ("sft", "ddp", (2, 1), 54, SEARCHING, {"dataloader_num_workers": 2}),
    # Of 3 rows, one process has 2 and the other 1.
    "unequal": ("sft", "ddp", (1, 2), 35, BY_SAMPLE, {"peft_config": DROPS}),
    # Of 5 rows accelerate makes 8 on 2 processes; on 3, steps have fewer batches, and it would make 12.
    "batches": ("trainer", "fsdp2", (2, 3), 77, AS_CONFIGURED, {"gradient_accumulation_steps": 3}),
    # Of 6 rows in two batches, which are means, each process has 2 and 1; accelerate would fill the second.
    "means": ("reward", "ddp", (1, 2), 38, AS_CONFIGURED, {}),
}
"""What is resumed in an epoch whose last step is not full, on how many processes, of so many rows."""


@pytest.mark.parametrize("case", NOT_FULL)
def test_so_does_an_epoch_whose_last_step_is_not_full(case: str, tmp_path: Path) -> None:
    kind, way, (before, now), count, options, more = NOT_FULL[case]
    if "peft_config" in more:
        more = {"peft_config": lora(**more["peft_config"])}
    run = partial(part, options=options, count=count, max_steps=6, **more)
    whole = on_ranks(run, before, kind, way, str(tmp_path / "whole"), 6, None)
    full = count // (4 * before * more.get("gradient_accumulation_steps", 2))
    begun = on_ranks(run, before, kind, way, str(tmp_path), full, None)
    checkpoint = f"{tmp_path}/checkpoint-{full}"
    seen = on_ranks(run, now, kind, way, str(tmp_path), 6, checkpoint, Loss(4))
    assert whole_steps(begun) + whole_steps(seen) == whole_steps(whole)
    assert_near(apart(*(logged(parts[0]) for parts in (seen, whole))))


def logged(one: dict[str, Any]) -> Result:
    names = ("loss", "grad_norm", "learning_rate")
    entries = [dict(zip(names, values, strict=True)) for values in one["logs"]]
    return Result(entries, torch.empty(0))


def test_a_mean_of_rows_that_processes_cannot_share_is_refused(tmp_path: Path) -> None:
    run = partial(part, count=35, max_steps=6)
    on_ranks(run, 1, "reward", "ddp", str(tmp_path), 1, None)
    with pytest.raises(AssertionError, match="the last step of an epoch has 3 rows, which 2 proc"):
        on_ranks(run, 2, "reward", "ddp", str(tmp_path), 2, f"{tmp_path}/checkpoint-1")
