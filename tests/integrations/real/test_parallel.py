"""Models that transformers spreads by itself, by tensors, experts and FSDP2, in a loop of the library."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.helpers.faults import FailingMemory, fail_at_each, survivable
from tests.helpers.ranks import run_ranks
from tests.integrations.real.trainers import AS_CONFIGURED, LLAMA, trained
from torchtune_adaptive import AdaptiveStep, UsageError, find_batch_size
from torchtune_adaptive.core.private import unfinished_works
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.library import step as step_module

try:
    from transformers.distributed import DistributedConfig

    known = {field.name for field in dataclasses.fields(DistributedConfig)}
except ImportError:
    known = set()
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.ranks,
    pytest.mark.skipif(
        not known >= {"tp_size", "fsdp_size", "dp_replicate_size", "ep_size"},
        reason=f"transformers {transformers.__version__} does not spread models like that",
    ),
]
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
WAYS: dict[str, tuple[str, int, dict[str, int]]] = {
    "tensors": ("Llama", 2, {"tp_size": 2}),
    "tensors, with FSDP": ("Qwen3", 4, {"tp_size": 2, "fsdp_size": 2}),
    "experts": ("Qwen3Moe", 2, {"fsdp_size": 2, "ep_size": 2}),
    "experts that are sharded": ("Qwen3Moe", 4, {"fsdp_size": 4, "ep_size": 2}),
    "experts, with HSDP": (
        "Qwen3Moe",
        4,
        {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
    ),
    "experts, with tensors": ("Qwen3Moe", 4, {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}),
}
ROWS = 8  # of all ranks


def rows_of(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, LLAMA["vocab_size"], (12,), generator=generator) for _ in range(ROWS)]


class Spread:
    """A tiny model of transformers, spread by its settings, and its step."""

    def __init__(self, folder: str, way: dict[str, int], **settings: Any) -> None:
        config = DistributedConfig(**way) if way else None
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=config
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.step = AdaptiveStep(
            self.model, self.optimizer, self.forward, max_grad_norm=1.0, **settings
        )
        same_rows = way.get("tp_size", 1)
        self.place = self.step.ranks.rank // same_rows
        self.places = self.step.ranks.size // same_rows

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
        labels = tokens[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, labels.numel()

    def take(self, size: int, seed: int = 0) -> Any:
        """A step of the rows of all ranks, of which this one has a part."""
        return self.step(rows_of(seed)[self.place :: self.places], torch.stack, size)

    def weights(self) -> list[torch.Tensor]:
        parameters = self.model.parameters()
        parts = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
        return [part.detach().clone() for part in parts]


def log_of(folder: str, way: dict[str, int]) -> list[tuple[float, ...]]:
    run = Spread(folder, way)
    outcomes = (run.take(1, seed) for seed in range(4))
    return [(each.weight, each.loss, each.gradient_norm) for each in outcomes]


def fail_in_steps(folder: str, way: dict[str, int]) -> Counter[str]:
    """Run out of memory at operations of a step, on one rank after the other; count what is wrong."""
    memory = FailingMemory()
    step_module.device_memory = lambda *_: memory  # type: ignore[assignment]
    run = Spread(folder, way)
    rows = ROWS // run.places
    for _ in range(3):
        run.take(rows)
    snapshot = Snapshot(run.model, [run.optimizer], torch.device("cpu"))
    run.take(rows // 2)
    expected = run.weights()
    snapshot.restore()
    last, _ = survivable(memory, run.step.train_step, lambda: run.take(rows))
    snapshot.restore()
    counts: Counter[str] = Counter()
    for _, _, failure in fail_at_each(range(1, last + 1, 29), memory, run.step.ranks):
        run.step._begin(rows)
        with failure:
            outcome = run.take(rows)
        counts["tried"] += 1
        counts["retried"] += outcome.retried
        counts["wrong"] += not all(map(torch.equal, run.weights(), expected))
        counts["unfinished"] += unfinished_works()
        snapshot.restore()
    return counts


def search(folder: str, way: dict[str, int]) -> tuple[int, list[bool], bool]:
    """The size that a search finds, which trials fit, and whether it has left the run as it was."""
    run, other = Spread(folder, way, memory_limit="4MiB"), Spread(folder, way)
    row = rows_of(0)[0]
    size = find_batch_size(run.step, lambda rows: row.repeat(rows, 1), ceiling=256)
    same = run.take(1) == other.take(1) and all(map(torch.equal, run.weights(), other.weights()))
    return int(size), [trial.fits for trial in size.trials], same


def refused_by_a_trainer(folder: str) -> str:
    spread = Spread(folder, {"fsdp_size": 2}).model
    with pytest.raises(UsageError) as refused:
        trained("trainer", AS_CONFIGURED, model=spread)
    return str(refused.value)


def refused_in_the_first_step(folder: str, way: dict[str, int]) -> str:
    run = Spread(folder, way)
    with pytest.raises(UsageError) as refused:
        run.take(1)
    return str(refused.value)


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder with a tiny model of random weights."""
    name = request.param
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(**LLAMA | heads | MODELS[name])
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(("saved", "ranks", "way"), WAYS.values(), ids=WAYS, indirect=["saved"])
def test_the_log_is_that_of_one_rank(saved: str, ranks: int, way: dict[str, int]) -> None:
    [alone] = run_ranks(log_of, 1, saved, {})
    spread = run_ranks(log_of, ranks, saved, way)
    assert spread == [spread[0]] * ranks
    for expected, seen in zip(alone, spread[0], strict=True):
        assert seen == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(("saved", "ranks", "way"), WAYS.values(), ids=WAYS, indirect=["saved"])
def test_memory_runs_out_at_operations_of_a_step(
    saved: str, ranks: int, way: dict[str, int]
) -> None:
    for counts in run_ranks(fail_in_steps, ranks, saved, way):
        assert counts["tried"] == counts["retried"] > 5
        assert counts["wrong"] == counts["unfinished"] == 0


@pytest.mark.parametrize("saved", ["Qwen3Moe"], indirect=True)
def test_a_search_leaves_the_run_as_it_was(saved: str) -> None:
    found = run_ranks(search, 2, saved, {"fsdp_size": 2, "ep_size": 2})
    assert found == [found[0]] * 2
    size, fits, same = found[0]
    assert size > 4 and any(fits) and not all(fits) and same


@pytest.mark.parametrize("saved", ["Qwen3"], indirect=True)
def test_gradients_that_hooks_reduce_again_are_refused(saved: str) -> None:
    """transformers reduces those of norms of heads, with the sum of earlier micro-batches in it."""
    said = run_ranks(refused_in_the_first_step, 2, saved, {"tp_size": 2})
    assert said == [said[0]] * 2
    assert "a hook reduces the gradient of model.layers" in said[0] and "fsdp_size=2" in said[0]


@pytest.mark.parametrize("saved", ["Llama"], indirect=True)
def test_trainers_refuse_such_models(saved: str) -> None:
    said = run_ranks(refused_by_a_trainer, 2, saved)
    assert said == [said[0]] * 2 and "distributed_config" in said[0]
