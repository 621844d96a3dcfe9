"""Plans of rows of other lengths, of which no step is traced: they are those of traces, to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from torchtune_adaptive.planner import Answer, TracedRun
from torchtune_adaptive.recipe import NotRemembered, Query
from torchtune_adaptive.recipe.plan.limits import length_limits
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides
from torchtune_adaptive.recipe.tracing.traces import Traces

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]

LENGTH = 1024
BETWEEN, BEYOND = 640, 3072
Case = tuple[int, str, tuple[str, ...]]


def case(ranks: int, name: str, *changes: str) -> Case:
    return ranks, name, changes


CASES = [
    case(2, "llama3_2/1B_full"),
    case(1, "llama3_2/1B_qlora_single_device"),
    pytest.param(case(8, "llama3_1/8B_full"), marks=pytest.mark.exhaustive),
    case(2, "llama3_2/1B_full", "dataset.packed=True", f"tokenizer.max_seq_len={LENGTH}"),
    case(1, "llama3_2/1B_full_single_device", "enable_activation_checkpointing=True"),
    case(2, "llama3_2/3B_lora", "enable_activation_checkpointing=False"),
    case(2, "qwen2_5/3B_full", "gradient_accumulation_steps=4"),
    pytest.param(case(1, "mistral/7B_qlora_single_device"), marks=pytest.mark.exhaustive),
]


def asked(ranks: int, name: str, changes: tuple[str, ...], cache: str = "False") -> Query:
    cfg = with_overrides(load_config(name), [f"adaptive_batching.cache={cache}", *changes])
    return plan_request(cfg, ranks, "h100-80gb", length=LENGTH).query()


def answer(query: Query, length: int, traces: Traces) -> Answer:
    return TracedRun(traces, length).answer(replace(query, length=length).question)


def require_same(found: Answer, expected: Answer) -> None:
    """Peaks to the byte. Speeds nearly: what an embedding reads is bounded by its table, so it bends."""
    assert (found.peak, found.largest) == (expected.peak, expected.largest)
    assert found.speed is not None and expected.speed is not None
    assert found.speed.seconds == pytest.approx(expected.speed.seconds, rel=1e-4)


def traced_and_computed(ranks: int, name: str, changes: tuple[str, ...]) -> None:
    query = asked(ranks, name, changes)
    traces = query.traces()
    answer(query, LENGTH, traces)
    length_limits(query, [LENGTH // 2], traces)
    known = dict(traces._steps)
    for length in (BETWEEN, BEYOND):
        require_same(answer(query, length, traces), answer(query, length, query.traces()))
    assert traces._steps == known


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join((case[1], *case[2])))
def test_what_is_computed_is_what_is_traced(case: Case) -> None:
    run_ranks(traced_and_computed, 1, *case, join=False, timeout=600)


def traced_where_it_does_not_follow(ranks: int, name: str, changes: tuple[str, ...]) -> None:
    query = asked(ranks, name, changes)
    traces = query.traces()
    answer(query, LENGTH, traces)
    length_limits(query, [LENGTH // 2], traces)
    require_same(answer(query, BEYOND, traces), answer(query, BEYOND, query.traces()))
    assert str((2, BEYOND)) in traces._steps


@pytest.mark.exhaustive
def test_a_model_with_scores_for_pairs_of_tokens_is_traced() -> None:
    """Gemma 2 caps its scores, so they are matrices."""
    run_ranks(
        traced_where_it_does_not_follow, 1, *case(1, "gemma2/2B_lora_single_device"), timeout=600
    )


def remembered(folder: str) -> None:
    config = case(1, "llama3_2/1B_lora_single_device")
    query = asked(*config, cache=folder)
    length_limits(query, [LENGTH // 2])
    without_torch = replace(query, may_trace=False)
    again = asked(*config)  # without a cache
    require_same(
        answer(query, BEYOND, without_torch.traces()), answer(again, BEYOND, again.traces())
    )
    with pytest.raises(NotRemembered):
        answer(query, BEYOND + 1, without_torch.traces())


def test_what_is_remembered_answers_for_other_lengths(tmp_path: Path) -> None:
    run_ranks(remembered, 1, str(tmp_path), join=False, timeout=300)
