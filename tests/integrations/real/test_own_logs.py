"""What a ``compute_loss`` of the user's own logs is what it logs in the plain trainer."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    SETTINGS,
    Loss,
    Padding,
    llama,
    lose_memory,
    on_ranks,
    tokens,
)
from torchtune_adaptive.integrations.transformers import adaptive


def logged(options: Any, lost: Loss | None = None) -> list[dict[str, float]]:
    import transformers

    class Logging(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **named)
            if model.training:
                mine = float(inputs["input_ids"].float().mean())
                self.log({"mine": mine, "rows": len(inputs["input_ids"])})
            return loss

    kind = Logging if options is None else adaptive(Logging, options)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(folder, **SETTINGS, use_cpu=True)
        trainer = kind(llama(), args, train_dataset=tokens(), data_collator=Padding())
        if lost is not None:
            lose_memory(trainer, lost)
        trainer.train()
        times = ("runtime", "per_second")
        return [
            {name: value for name, value in entry.items() if not name.endswith(times)}
            for entry in trainer.state.log_history
        ]


def logs() -> list[list[dict[str, float]]]:
    runs = [
        (None,),
        (AS_CONFIGURED,),
        (AS_CONFIGURED, Loss(times=1)),
        (AS_CONFIGURED, Loss()),
        (SEARCHING,),
    ]
    return [logged(*each) for each in runs]


def test_logs_of_compute_loss() -> None:
    [[plain, equal, checkpointed, smaller, searched]] = on_ranks(logs, 1)
    mine = lambda entries: [entry for entry in entries if "mine" in entry]  # noqa: E731
    assert len(mine(plain)) == 4 * 2 and mine(plain) == mine(equal) == mine(checkpointed)
    assert [*map(len, plain)] == [
        len({*entry} - {"adaptive/micro_batch", "adaptive/retried_steps"}) for entry in equal
    ]
    for other in (smaller, searched):  # a mean of the step for each of its batches
        assert [entry["step"] for entry in mine(other)] == [entry["step"] for entry in mine(plain)]
        for step in range(4):
            means = [
                sum(entry["mine"] for entry in mine(each)[2 * step : 2 * step + 2])
                for each in (plain, other)
            ]
            assert means[0] == pytest.approx(means[1])
