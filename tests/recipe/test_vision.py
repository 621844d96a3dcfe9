"""Images: the tiny vision model is searched, trained and planned like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torchtune import config
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tests.helpers import runs
from tests.helpers.accelerator import Card
from tests.helpers.knobs import Training
from tests.helpers.ranks import Alone, run_ranks
from tests.helpers.recipes import run_ours, run_torchtunes, tiny_config
from tests.helpers.torchvision import use_torchvision
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.core.ranks.watchdog import Watchdog
from torchtune_adaptive.core.rows.order import SampleOrder
from torchtune_adaptive.core.step.knobs import OFFLOADING
from torchtune_adaptive.core.step.objective import NextTokenPrediction
from torchtune_adaptive.recipe.data.dataset import Data, data_of, load_rows
from torchtune_adaptive.recipe.data.row_lengths import RowLengths
from torchtune_adaptive.recipe.data.rows import TOKEN_ROWS, RowSize, images_of
from torchtune_adaptive.recipe.search.fastest_search import find_fastest, possible_choices
from torchtune_adaptive.recipe.search.prober import Prober, RowsToTry
from torchtune_adaptive.recipe.search.worst_case import WorstCase, worst_case
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.model import parameters_by_name
from torchtune_adaptive.recipe.tracing.self_check import measured_peaks, traced_peaks
from torchtune_adaptive.recipe.tracing.tracer import Tracer

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

use_torchvision()  # here, because ranks import this module, too

SIZES = [(2, 64), (3, 141), (5, 100)]


def with_torchvision(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a rank; that it is found in this module makes the rank import it."""
    return function(*arguments)


def vision_data(cfg: DictConfig) -> Data:
    objective = NextTokenPrediction(CEWithChunkedOutputLoss())
    asked = Asked.of(cfg)
    loaded = load_rows(asked)
    return data_of(asked, loaded.tokenizer, loaded.training, TOKEN_ROWS, objective)


@pytest.fixture(scope="module")
def data() -> Data:
    return vision_data(tiny_config("full_vision", "unused"))


def worst_of(data: Data, asked: int | None = None) -> WorstCase:
    cfg = tiny_config("full_vision", "unused")
    return worst_case(data, asked, Alone(), RowLengths(data.dataset, cfg, Alone(), cache=False))


def test_the_worst_row_has_the_longest_text_and_the_most_of_the_largest_images(data: Data) -> None:
    rows = [data.dataset[i] for i in range(len(data.dataset))]
    long = max(
        (row for row in rows if TOKEN_ROWS.size(row).images == 1),
        key=lambda row: TOKEN_ROWS.size(row).tokens,
    )
    two = next(
        row for row in rows if TOKEN_ROWS.size(row).images == 2 and TOKEN_ROWS.size(row).tiles == 2
    )
    tiled = next(
        row for row in rows if TOKEN_ROWS.size(row).images == 1 and TOKEN_ROWS.size(row).tiles == 4
    )
    worst = worst_of(replace(data, dataset=[two, long, tiled]))
    assert worst.size == RowSize(TOKEN_ROWS.size(long).tokens, 2, 4), (
        "no row has it all, but a batch does"
    )
    assert {len(image) for image in images_of(worst.row)} == {4}


def test_no_batch_is_larger_in_any_part(data: Data) -> None:
    def shapes(batch: dict[str, Any]) -> list[torch.Size]:
        images = batch["encoder_input"]
        tensors = [batch["tokens"], batch["labels"], batch["encoder_mask"], *images.values()]
        return [tensor.shape for tensor in tensors]

    largest = shapes(worst_of(data).batch(8))
    for start in range(0, len(data.dataset), 8):
        rows = [data.dataset[i] for i in range(start, start + 8)]
        for one, bound in zip(shapes(data.collate(rows)), largest, strict=True):
            assert all(a <= b for a, b in zip(one, bound, strict=True))


def test_another_length_keeps_the_images(data: Data) -> None:
    worst = worst_of(data, asked=200)
    assert worst.size == RowSize(200, 2, 4)
    batch = worst.of_length(90).batch(3)
    assert batch["tokens"].shape == (3, 90) and (batch["labels"] == 0).all()
    assert batch["encoder_mask"].shape == (3, 90, 2 * 4 * 5) and batch["encoder_mask"].all()


def fastest_on_a_card() -> tuple[set[Any], int]:
    """The values of the knob that torchtune refuses, and the choices that were tried."""
    changes = {"device": "cuda", "use_fastest_configuration": True, "max_steps_per_epoch": None}
    cfg = tiny_config("full_vision", "unused", **changes)
    card = Card(1 << 40)
    card.install(pytest.MonkeyPatch())
    trained = Training(cfg, card.memory())
    watchdog = Watchdog(trained.ranks, 20.0, on_duty=False)
    prober = Prober(trained.step, trained.ranks, watchdog, Asked.of(cfg))
    data = vision_data(cfg)
    order = SampleOrder(len(data.dataset), 1, shuffle=True)
    lengths = RowLengths(data.dataset, cfg, trained.ranks, False, data.rows.length)
    rows = RowsToTry(data, order, Asked.of(cfg).batch(1), lengths)
    allowed = possible_choices(prober)
    report = find_fastest(prober, rows, known=dict(allowed[0]))
    return {one.get(OFFLOADING) for one in allowed}, len(report.tried)


@pytest.mark.exhaustive
def test_the_fastest_configuration_on_cuda_does_not_offload() -> None:
    assert run_ranks(with_torchvision, 1, fastest_on_a_card) == [({None}, 1)]


def losses(run: Any, kind: str, folder: Path, ranks: int = 2, **changes: Any) -> list[float]:
    cfg = tiny_config(kind, folder, **changes)
    [steps, *_] = run_ranks(with_torchvision, ranks, run, kind.split("_")[0], cfg, join=False)
    return runs.losses(steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["full_vision", "lora_vision"])
def test_a_search_finds_a_size_and_leaves_no_trace(tmp_path: Path, kind: str) -> None:
    search = {"use_maximum_batch_size": True, "adaptive_batching.memory_limit": "24MiB"}
    found = losses(run_ours, kind, tmp_path / "found", **search)
    report = json.loads((tmp_path / "found/batch_size_search.json").read_text())
    assert report["images_per_row"] == 2 and report["tiles_per_image"] == 4
    told = losses(run_ours, kind, tmp_path / "told", batch_size=report["batch_size"])
    assert found == told and len(found) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["full_vision", "lora_vision"])
def test_ranks_that_do_not_divide_the_batch_change_no_step(tmp_path: Path, kind: str) -> None:
    changes = {"batch_size": 1, "gradient_accumulation_steps": 4, "save_every_n_steps": 1}
    changes |= {"keep_last_n_checkpoints": 9}
    whole = losses(run_ours, kind, tmp_path / "whole", **changes)
    first = runs.stopped_after(1, tmp_path / "whole", tmp_path / "first")
    uneven = losses(run_ours, kind, first, 3, **changes, **runs.RESUME)
    # This model makes much of the rounding of a step: so it does on one rank, which has all rows.
    assert uneven[0] == pytest.approx(whole[1], rel=1e-6)
    assert uneven == pytest.approx(whole[1:], rel=1e-3)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["lora_vision", "full_vision"])
def test_losses_are_torchtunes(tmp_path: Path, kind: str) -> None:
    ours = losses(run_ours, kind, tmp_path / "ours")
    assert ours == losses(run_torchtunes, kind, tmp_path / "theirs") and len(ours) == 3


def measured(kind: str) -> dict[tuple[int, int], int]:
    cfg = tiny_config(kind, "unused")
    data = vision_data(cfg)
    row = next(
        row for row in data.dataset if TOKEN_ROWS.size(row) == RowSize(len(row["tokens"]), 1, 4)
    )
    worst = WorstCase({**row, "labels": row["tokens"]}, "a row", data)

    def batch(rows: int, length: int) -> dict[str, Any]:
        made = worst.of_length(length).batch(rows)
        text = torch.zeros_like(made["tokens"])
        # One image each, where repeating the row repeats the token that stands for it.
        text[:, 0] = data.tokenizer.tokenizer.image_id
        return {**made, "tokens": text, "labels": torch.zeros_like(text)}

    return measured_peaks(Asked.of(cfg), SIZES, batch)


def predicted(kind: str, ranks: int) -> dict[tuple[int, int], int]:
    return traced_peaks(Tracer(Asked.of(tiny_config(kind, "unused")), ranks), SIZES)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "ranks"), [("full_vision", 2), ("lora_vision", 1)])
def test_predicted_peaks_are_measured_peaks(kind: str, ranks: int) -> None:
    measurement = run_ranks(with_torchvision, ranks, measured, kind)[0]
    [prediction] = run_ranks(with_torchvision, 1, predicted, kind, ranks, join=False)
    assert prediction == measurement


def test_a_token_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token_budget: True .* images"):
        run_ours(
            "full", tiny_config("full_vision", tmp_path, **{"adaptive_batching.token_budget": True})
        )


def test_parameters_have_the_names_that_checkpoints_have() -> None:
    model = config.instantiate(tiny_config("full_vision", "unused").model)
    named = parameters_by_name(model)
    assert named.keys() == model.state_dict().keys()
    assert len(named) == len(list(model.parameters()))
