"""Token budgets in a caller's loop: the same terms per step, and on every rank as many micro-batches."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.helpers.decoder import local_values
from tests.helpers.faults import fail_at_each, survivable
from tests.helpers.library import Trained, failing
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive import UsageError, find_batch_size, steps_of
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.library.division import by_tokens

WORDS = 16
LONGEST = 40
DOCS = Path(__file__).parents[2] / "docs" / "library.md"


def sentences(count: int, seed: int = 0) -> list[list[int]]:
    """Rows of very different lengths; the first is the longest."""
    draw = random.Random(seed)
    lengths = [LONGEST, *(draw.choice([2, 3, 5, 8, 13, 21, 34]) for _ in range(count - 1))]
    return [[draw.randrange(WORDS) for _ in range(length)] for length in lengths]


def padded(rows: list[list[int]]) -> dict[str, Any]:
    longest = max(map(len, rows))
    labels = [row + [-100] * (longest - len(row)) for row in rows]
    tokens = torch.tensor(labels).clamp(min=0)
    return {"tokens": tokens, "labels": torch.tensor(labels), "count": sum(map(len, rows))}


class Speaking(Trained):
    """A loop over rows of tokens."""

    def __init__(self, way: str, **settings: Any) -> None:
        embedding = lambda model: nn.Sequential(nn.Embedding(WORDS, WORDS), *model)  # noqa: E731
        super().__init__(way, width=WORDS, wrap=embedding, **settings)

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        logits = self.model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return loss, batch["count"]

    def take(self, rows: list[list[int]], tokens: int) -> Any:
        return self.step(rows, padded, tokens, lengths=[*map(len, rows)])


class Together(Ranks):
    """Ranks of which the others have these lengths."""

    def __init__(self, *others: list[int]) -> None:
        self._others, self.rank = others, 0

    def largest(self, numbers: Sequence[int]) -> list[int]:
        return [*map(max, numbers, *map(sorted, self._others))]


def test_each_row_is_in_a_micro_batch_within_the_budget_and_ranks_have_as_many() -> None:
    draw = random.Random(0)
    for _ in range(200):
        count, tokens = draw.randint(1, 30), draw.choice([1, 50, 100, 400])
        one, other = ([draw.randint(1, 100) for _ in range(count)] for _ in range(2))
        divided = [by_tokens(a, Together(b))(0, tokens) for a, b in ((one, other), (other, one))]
        for lengths, parts in zip((one, other), divided, strict=True):
            assert sorted(row for part in parts for row in part) == [*range(count)]
            for part in parts:
                assert len(part) == 1 or len(part) * max(lengths[row] for row in part) <= tokens
        assert [*map(len, divided[0])] == [*map(len, divided[1])]


def test_a_step_has_the_terms_that_it_has_in_rows() -> None:
    shapes: list[tuple[int, ...]] = []
    run, plain = Speaking("alone", max_grad_norm=0.5), Speaking("alone", max_grad_norm=0.5)
    forward = run.step.objective._forward

    def seeing(batch: dict[str, Any]) -> Any:
        shapes.append(tuple(batch["tokens"].shape))
        return forward(batch)

    run.step.objective._forward = seeing
    for seed in range(3):
        outcome = run.take(sentences(12, seed), 60)
        expected = plain.step(sentences(12, seed), padded, 12)
        assert outcome.weight == expected.weight == sum(map(len, sentences(12, seed)))
        assert outcome.loss == pytest.approx(expected.loss, rel=1e-6)
        assert outcome.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
        assert outcome.micro_batch == 60
    assert max(rows * length for rows, length in shapes) <= 60
    assert max(rows for rows, _ in shapes) > 60 // LONGEST, "short rows are many"


def test_running_out_of_memory_halves_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    run, memory = failing("alone", kind=Speaking)
    with memory.fail_at(5):
        outcome = run.take(sentences(8), 100)
    assert (outcome.retried, outcome.micro_batch) == (1, 50)
    assert "token budget 100 -> 50 (out of memory in forward on rank 0, step 1)" in caplog.text
    again, _ = failing("alone", kind=Speaking)
    again.step.load_state_dict(run.step.state_dict())
    assert again.take(sentences(8), 100).micro_batch == 50, "what was learned is kept"
    assert again.step(sentences(8), padded, 8).micro_batch == 8, "rows are another size"
    state = run.step.state_dict()
    del state["unit"]  # as saved before there were budgets
    again.step.load_state_dict(state)


def test_a_phase_has_the_results_that_it_has_in_rows(caplog: pytest.LogCaptureFixture) -> None:
    run, memory = failing("alone", kind=Speaking)
    shapes: list[tuple[int, ...]] = []

    def scores(batch: dict[str, Any]) -> torch.Tensor:
        shapes.append(tuple(batch["tokens"].shape))
        return (run.model(batch["tokens"]).sum(2) * (batch["labels"] >= 0)).sum(1)

    score, rows = run.step.forward_only(scores), sentences(12)
    expected = torch.stack(score(rows, padded, 12))
    shapes.clear()
    with memory.fail_at(9):
        found = torch.stack(score(rows, padded, 100, lengths=[*map(len, rows)]))
    torch.testing.assert_close(found, expected)
    assert max(rows * length for rows, length in shapes) <= 100
    assert len({rows for rows, _ in shapes}) > 1, "short rows are many"
    assert "token budget of scores 100 -> 50 (out of memory in scores on rank 0)" in caplog.text
    with pytest.raises(UsageError, match="row 0 has 40 tokens, and a micro-batch may have 39"):
        score(rows, padded, 39, lengths=[*map(len, rows)])


def compare_on_ranks(way: str, sample: Sample) -> dict[str, Any]:
    """Memory runs out on one rank after the other, in steps of rows whose lengths differ between ranks."""
    run, memory = failing(way, kind=Speaking)
    ranks = run.step.ranks
    rows = sentences(8) if ranks.rank == 0 else [row[:3] for row in sentences(8, ranks.rank)]
    for _ in range(2):
        run.take(rows, 2 * LONGEST)
    snapshot = Snapshot(run.model, [run.optimizer], torch.device("cpu"))
    expected = run.step(rows, padded, 8)
    weights = local_values(run.model)
    snapshot.restore()
    seen = {"far": 0.0, "tried": 0, "sizes": set()}
    last, _ = survivable(memory, run.step.train_step, lambda: run.take(rows, 2 * LONGEST))
    snapshot.restore()
    for _, _, failure in fail_at_each(sample.of(last), memory, ranks):
        run.step._begin(2 * LONGEST, "token")
        with failure:
            outcome = run.take(rows, 2 * LONGEST)
        seen["tried"] += outcome.retried
        seen["sizes"].add(outcome.micro_batch)
        assert outcome.weight == expected.weight
        far = [abs(outcome.loss / expected.loss - 1)]
        far += [
            float((a - b).abs().max())
            for a, b in zip(local_values(run.model), weights, strict=True)
        ]
        seen["far"] = max(seen["far"], *far)
        snapshot.restore()
    return seen


@pytest.mark.ranks
@pytest.mark.rotating
@pytest.mark.parametrize(("way", "ranks"), [("fsdp", 2), ("ddp", 2), ("alone", 1), ("hsdp", 4)])
def test_the_same_terms_wherever_memory_runs_out(way: str, ranks: int, sample: Sample) -> None:
    sample = sample.every(exhaustive=7, quick=41)
    timeout = 280 if sample.exhaustive else 60
    for seen in run_ranks(compare_on_ranks, ranks, way, sample, timeout=timeout):
        assert seen["tried"] >= 1 and seen["sizes"] == {LONGEST}
        assert seen["far"] <= 1e-6


def refused_on_ranks() -> list[str]:
    run, said = Speaking("ddp"), []
    rows = sentences(4)
    rank = dist.get_rank()
    calls = [
        partial(run.step, rows, padded, 40, lengths=[*map(len, rows)] if rank else None),
        partial(run.take, rows, 40 if rank else 39),
        partial(run.take, rows, 40 + rank),
    ]
    for call in calls:
        with pytest.raises(UsageError) as refused:
            call()
        said.append(str(refused.value))
    return [*said, str(run.take(rows, 40).weight)]


@pytest.mark.ranks
def test_ranks_that_do_not_do_the_same_are_refused() -> None:
    one, other = run_ranks(refused_on_ranks, 2)
    assert one[0] == other[0] and "lengths: given on one rank and not on another" in one[0]
    assert "lengths: row 0 has 40 tokens, and a micro-batch may have 39" in one[1]
    assert "another rank was called with arguments that are refused there" in other[1]
    assert one[2] == other[2] and "size: 40 on one rank and 41 on another" in one[2]
    assert one[3] == other[3], "and then a step is taken"


@pytest.mark.parametrize(
    "lengths", [3, "abcd", [1, 2], [1, 2, 3, 0], [1, 2, 3, 2.5], [1, 2, 3, 41]]
)
def test_lengths_that_are_none(lengths: Any) -> None:
    with pytest.raises(UsageError, match=r"^lengths: ") as refused:
        Speaking("alone").step([[1]] * 4, padded, 40, lengths=lengths)
    assert "\n" not in str(refused.value)


def test_the_documented_loop_runs() -> None:
    [section] = re.findall(
        r"^## Rows of different lengths\n(.*?)^## ", DOCS.read_text(), re.M | re.S
    )
    [code] = re.findall(r"```python\n(.*?)```", section, re.S)
    run = Speaking("alone", memory_limit="48KiB")
    data = [{"tokens": row} for row in sentences(64)]
    seen: list[Any] = []

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
        return padded([row["tokens"] for row in rows])

    def step(*args: Any, **named: Any) -> Any:
        seen.append(run.step(*args, **named))
        return seen[-1]

    given = {"find_batch_size": lambda _, *args, **named: find_batch_size(run.step, *args, **named)}
    found = given | {"steps_of": steps_of, "step": step, "collate": collate, "data": data}
    exec(code, found)
    assert found["tokens"] == found["fits"] * LONGEST and 1 <= found["fits"] < 16
    assert [outcome.retried for outcome in seen] == [0, 0, 0, 0]
    assert sum(outcome.weight for outcome in seen) == sum(len(row["tokens"]) for row in data)
