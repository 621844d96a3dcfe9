"""Scoring: what models say about responses, on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchtune.models.qwen2 import qwen2

from tests.helpers.decoder import VOCABULARY
from tests.helpers.rollouts import PADDING, answered, policy
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.recipe.rollout.projection import LogProbs
from torchtune_adaptive.recipe.rollout.rows import collate
from torchtune_adaptive.recipe.rollout.score import Scoring, values_of

CPU = torch.device("cpu")


def expected(model: nn.Module, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    log_probs = torch.log_softmax(model(tokens).float() / temperature, -1)[:, :-1]
    return log_probs.gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens", [2, 5, 29])
def test_log_probs_are_those_of_the_next_tokens(temperature: float, tokens: int) -> None:
    model = policy()
    rows = torch.randint(0, VOCABULARY, (3, tokens), generator=torch.Generator().manual_seed(0))
    gradients = []
    for found in (
        expected(model, rows, temperature),
        LogProbs(model, temperature)(rows)[:, :-1],
    ):
        model.zero_grad()
        found.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(found, expected(model, rows, temperature), atol=1e-5, rtol=0)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    assert model(rows).shape == (3, tokens, VOCABULARY), "the model is as it was"


def scoring() -> Scoring:
    torch.manual_seed(0)
    value = policy(2)
    value.output = nn.Linear(8, 1)
    log_probs = {"old": LogProbs(policy(0)), "reference": LogProbs(policy(1))}
    return Scoring(PADDING, CPU, log_probs, {"values": values_of(value)})


@torch.no_grad()
def test_each_row_gets_its_numbers_whatever_rows_are_beside_it() -> None:
    rows, score = answered(10), scoring()
    at_once = score(rows)
    for size in (1, 4):
        parts = [each for at in range(0, 10, size) for each in score(rows[at : at + size])]
        torch.testing.assert_close(parts, at_once, atol=1e-6, rtol=1e-5)
    for row, found in zip(rows, at_once, strict=True):
        assert row.response is not None
        whole = torch.cat([torch.tensor(row.prompt), row.response])[None]
        for seed, name in enumerate(("old", "reference")):
            wanted = expected(policy(seed), whole, 1.0)[0, len(row.prompt) - 1 :]
            torch.testing.assert_close(found[name], wanted, atol=1e-5, rtol=0.0)
        assert len(found["values"]) == len(row.response) + 1


@torch.no_grad()
def test_nothing_of_a_micro_batch_stays() -> None:
    rows, score, memory = answered(8), scoring(), SimulatedMemory(1 << 30)
    with memory.running():
        found = score(rows)
    assert memory.in_use() == 0 and len(found) == 8


@pytest.mark.parametrize("trained", [False, True])
def test_whole_logits_never_exist(trained: bool) -> None:
    model, memory = policy(), SimulatedMemory(1 << 30)
    model.output = nn.Linear(8, 1000)
    batch = collate(answered(8), PADDING)
    with memory.running(), torch.set_grad_enabled(trained):
        memory.watch()
        log_probs = LogProbs(model)(batch["tokens"])
        if trained:
            log_probs.sum().backward()
    whole = batch["tokens"].numel() * 1000 * 4
    assert memory.usage().peak_allocated_bytes < (whole if trained else whole / 2)


def test_a_projection_may_be_tied_to_the_embeddings() -> None:
    torch.manual_seed(0)
    shape = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 8}
    shape |= {"vocab_size": VOCABULARY, "intermediate_dim": 12, "max_seq_len": 32}
    model = qwen2(**shape, tie_word_embeddings=True)
    rows = torch.randint(0, VOCABULARY, (2, 9))
    found = LogProbs(model)(rows)
    torch.testing.assert_close(found[:, :-1], expected(model, rows, 1.0), atol=1e-5, rtol=0.0)
    found.sum().backward()
    assert model.tok_embeddings.weight.grad is not None
