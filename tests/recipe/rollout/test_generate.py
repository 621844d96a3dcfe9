"""Responses: each row's depends on its prompt and its draws alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchtune.generation import sample as torchtunes_sample
from torchtune.modules import KVCache

from tests.helpers.decoder import VOCABULARY
from tests.helpers.faults import FailingMemory
from tests.helpers.rollouts import LONGEST_PROMPT, MAX_NEW, generation, policy, prompted
from tests.helpers.samples import Sample
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.recipe.rollout.generate import Generation, Response, sampled
from torchtune_adaptive.recipe.rollout.rows import Row


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def tokens_of(responses: list[Response]) -> list[list[int]]:
    return [response.tokens.tolist() for response in responses]


def step_by_step(model: nn.Module, row: Row, settings: Generation) -> list[int]:
    """A response without caches, padding, or other rows."""
    tokens = torch.tensor([row.prompt])
    for at in range(settings.max_new):
        drawn = sampled(
            model(tokens)[:, -1], row.draws[at, None], settings.temperature, settings.top_k
        )
        tokens = torch.cat([tokens, drawn[None]], 1)
        if int(drawn) in settings.stop_tokens:
            break
    return tokens[0, len(row.prompt) :].tolist()


SAMPLING = [{}, {"temperature": 0.5, "top_k": 3}, {"temperature": 0.0}]


@pytest.mark.parametrize("settings", SAMPLING, ids=["plain", "top_k", "greedy"])
def test_a_response_is_the_same_whatever_rows_are_beside_it(settings: dict[str, Any]) -> None:
    model, rows = policy(), prompted(12)
    generate = generation(model, **settings)
    at_once = tokens_of(generate.alone(rows))
    in_fours = [each for at in range(0, 12, 4) for each in generate.alone(rows[at : at + 4])]
    assert tokens_of(in_fours) == at_once
    assert tokens_of(generate.alone(rows[::-1])) == at_once[::-1]
    assert [step_by_step(model, row, generate) for row in rows[:2]] == at_once[:2]
    assert [tokens_of(generate.alone([row]))[0] for row in rows[:4]] == at_once[:4]
    assert tokens_of(generate.together(rows)) == at_once
    assert settings.get("temperature") == 0.0 or len({*map(len, at_once)}) > 3, "lengths differ"


def test_what_a_row_draws_makes_its_response() -> None:
    generate = generation(policy())
    one, other = prompted(2)
    alike = [Row(0, one.prompt, one.draws), Row(1, one.prompt, other.draws)]
    first, second = tokens_of(generate.alone(alike))
    assert first != second and first == tokens_of(generate.alone([one]))[0]


@pytest.mark.parametrize(
    ("stop_tokens", "longest", "stopped"),
    [(range(VOCABULARY), 1, True), ([VOCABULARY], MAX_NEW, False), ([], MAX_NEW, False)],
    ids=["at the first token", "never", "there is none"],
)
def test_responses_end_with_a_stop_token(stop_tokens: Any, longest: int, stopped: bool) -> None:
    responses = generation(policy(), stop_tokens=[*stop_tokens]).alone(prompted(4))
    assert [len(each.tokens) for each in responses] == [longest] * 4
    assert [each.stopped for each in responses] == [stopped] * 4


def test_a_response_ends_with_the_first_of_several_stop_tokens() -> None:
    rows, stops = prompted(16), (1, 5)
    whole = generation(policy(), stop_tokens=[]).alone(rows)
    found = generation(policy(), stop_tokens=stops).alone(rows)
    for tokens, response in zip(tokens_of(whole), found, strict=True):
        ends = [at for at, token in enumerate(tokens) if token in stops]
        kept = tokens[: ends[0] + 1] if ends else tokens
        assert (response.tokens.tolist(), response.stopped) == (kept, bool(ends))
    assert {each.tokens.tolist()[-1] for each in found if each.stopped} == {*stops}


def test_the_padding_token_may_be_part_of_a_prompt() -> None:
    model, row = policy(), Row(0, [0, 3, 0], prompted(1)[0].draws)
    generate = generation(model)
    assert tokens_of(generate.alone([row])) == [step_by_step(model, row, generate)]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.7, 4), (2.0, VOCABULARY + 1)])
def test_samples_have_torchtunes_distribution(temperature: float, top_k: int | None) -> None:
    torch.manual_seed(0)
    logits = torch.randn(VOCABULARY).expand(40_000, -1)
    numbers = torch.rand(len(logits), dtype=torch.float64)
    ours = sampled(logits, numbers, temperature, top_k)
    theirs = torchtunes_sample(logits, temperature=temperature, top_k=top_k)[:, 0]
    shares = [each.bincount(minlength=VOCABULARY) / len(logits) for each in (ours, theirs)]
    torch.testing.assert_close(*shares, atol=0.015, rtol=0.0)
    assert torch.equal(shares[0] > 0, shares[1] > 0)


def test_every_number_draws_a_token_that_can_be() -> None:
    ends = torch.tensor([0.0, 1 - 2**-53, 0.0, 1 - 2**-53], dtype=torch.float64)
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, -torch.inf]]).expand(4, -1)
    assert sampled(logits, ends, 1.0, None).tolist() == [1, 2, 1, 2]
    assert sampled(logits * torch.nan, ends, 1.0, None).max() < 4, "a token of the vocabulary"


def test_nothing_stays_after_memory_runs_out(sample: Sample) -> None:
    """At each operation of a trial, the first of which set up caches."""
    model, rows = policy(), prompted(2)
    generate, memory = generation(model), FailingMemory()
    forward = vars(model.output).get("forward")
    expected = tokens_of(generate.trial(rows))
    with memory.fail_at(0) as fault, memory.running():
        generate.trial(rows)
    assert fault.seen > 100
    for operation in {*range(1, 20), *sample.of(fault.seen)}:
        with memory.fail_at(operation), pytest.raises(torch.OutOfMemoryError), memory.running():
            generate.trial(rows)
        assert not any(isinstance(module, KVCache) for module in model.modules())
        assert not any(getattr(module, "cache_enabled", False) for module in model.modules())
        assert vars(model.output).get("forward") is forward
    assert tokens_of(generate.trial(rows)) == expected
    assert not torch.equal(model(torch.tensor([[3]])), model(torch.tensor([[4]])))


def test_a_trial_takes_the_memory_of_a_whole_generation() -> None:
    rows = [Row(at, [3] * LONGEST_PROMPT, prompted(1)[0].draws) for at in range(4)]
    peaks = []
    for name in ("trial", "together", "alone"):
        memory = SimulatedMemory(1 << 30)
        generate = generation(policy(), stop_tokens=[])
        with memory.running():
            memory.watch()
            responses = getattr(generate, name)(rows)
        peaks.append(memory.usage().peak_allocated_bytes)
        assert memory.in_use() == 0 and len(responses) == 4
    assert len({*peaks}) == 1


def test_compiled_layers_generate_as_they_are() -> None:
    """They would be compiled for each number of rows, until torch compiles nothing more."""
    model, rows = policy(), prompted(2)
    expected = tokens_of(generation(model).alone(rows))
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    for layer in model.layers:
        layer.compile(backend=backend)
    assert tokens_of(generation(model).alone(rows)) == expected and not compiled
    model(torch.tensor([[3, 4]]))
    assert compiled
