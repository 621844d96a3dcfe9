"""Datasets that can only be iterated over: each process takes the rows that it would have been sent."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.real.trainers import (
    AS_ACCELERATE,
    AS_CONFIGURED,
    NAMES,
    SEARCHING,
    Loss,
    distance,
    on_ranks,
    texts,
    tokens,
    trained,
)
from tests.integrations.real.ways import WAYS, fsdp2_on_cpu
from torchtune_adaptive import UsageError

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]


def stream(kind: str, shards: int = 1) -> Any:
    rows = tokens() if kind == "trainer" else texts(*NAMES[kind])
    return rows.to_iterable_dataset(num_shards=shards)


def beside_plain(kind: str, shards: int, settings: dict[str, Any]) -> tuple[float, float, float]:
    """How far weights and logs are from those of the plain trainer, and logs where memory is lost."""
    if settings.get("fsdp"):
        fsdp2_on_cpu()
    run = lambda *how: trained(kind, *how, data=stream(kind, shards), **settings)  # noqa: E731
    plain, ours, lost = run(None), run(AS_ACCELERATE), run(AS_ACCELERATE, Loss())
    weights = float((plain.weights - ours.weights).abs().max())
    return weights, distance(ours, plain), distance(lost, plain)


CASES = [
    ("trainer", 1, 1, {}),
    (
        "trainer",
        2,
        4,
        {},
    ),  # shards for each process, which accelerate does not use where it sends batches
    ("trainer", 1, 2, {"dataloader_num_workers": 2}),
    ("trainer", 2, 1, WAYS["fsdp2"]),
    ("sft", 2, 1, {}),
    ("sft", 2, 4, {}),  # TRL has each process read its own
    ("sft", 2, 1, WAYS["fsdp2"]),
    ("dpo", 1, 1, {}),
    ("reward", 2, 1, {}),
]


@pytest.mark.parametrize(("kind", "count", "shards", "settings"), CASES)
def test_the_same_as_the_plain_trainer(
    kind: str, count: int, shards: int, settings: dict[str, Any]
) -> None:
    for weights, logs, lost in on_ranks(beside_plain, count, kind, shards, settings):
        assert weights == logs == 0 and lost <= 1e-6


def resumed() -> float:
    with tempfile.TemporaryDirectory() as folder:
        saves = {"save_strategy": "steps", "save_steps": 2, "folder": folder}
        whole = trained("sft", AS_CONFIGURED, data=stream("sft"), **saves)
        [checkpoint] = Path(folder).glob("checkpoint-2")
        again = trained("sft", AS_CONFIGURED, resume=str(checkpoint), data=stream("sft"), **saves)
    return float((whole.weights - again.weights).abs().max())


def test_a_stream_is_read_on_where_a_checkpoint_was_made() -> None:
    assert on_ranks(resumed, 1) == [0.0]


def refused() -> str:
    settings = {"accelerator_config": {"dispatch_batches": True}}
    with pytest.raises(UsageError) as error:
        trained("trainer", AS_CONFIGURED, data=stream("trainer"), **settings)
    return str(error.value)


def test_what_is_refused() -> None:
    """Who is sent batches has no rows."""
    for said in on_ranks(refused, 2):
        assert said.startswith("accelerator_config: with dispatch_batches, one process makes")


def where_there_is_a_limit() -> float:
    plain, ours = (trained("sft", how, data=stream("sft")) for how in (None, SEARCHING))
    assert ours.sizes == (4, 4)
    return distance(ours, plain)


def test_where_there_is_a_limit_it_begins_as_configured() -> None:
    """Without a length there is no longest row to try."""
    assert max(on_ranks(where_there_is_a_limit, 2)) <= 1e-6
