"""``plan --trainer SFTTrainer`` plans tiny copies of popular models, or says by name why it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.popular_models import (
    LOOPS,
    POPULAR,
    REFUSALS,
    WORDS,
    Popular,
    answer,
    as_table,
    write_tiny,
)
from tests.helpers.torchvision import FOLDER
from torchtune_adaptive.planner import processes

ROOT = Path(__file__).parents[2]
Call = Callable[..., Future[Any]]


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    # transformers cannot use the torchvision that tests of torchtune's models have put there.
    elsewhere = [folder for folder in sys.path if folder != str(FOLDER)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", elsewhere)
        with processes("tests.helpers.preload_transformers") as found:
            yield found


@pytest.mark.rotating(2)
@pytest.mark.parametrize("model", POPULAR, ids=lambda model: model.name)
def test_a_model_is_planned_or_refused_by_name(model: Popular, call: Call, tmp_path: Path) -> None:
    write_tiny(tmp_path, model)
    if model.answer in REFUSALS:
        status, said = call(answer, str(tmp_path), ()).result(300)
        assert status == 2 and REFUSALS[model.answer] in said, said
    if model.answer != LOOPS:
        status, said = call(answer, str(tmp_path), WORDS[model.answer]).result(300)
        assert status == 0 and "per_device_train_batch_size 8: FITS" in said, said


def test_the_page_has_all_models() -> None:
    assert len({one.name for one in POPULAR}) == len(POPULAR) >= 60
    assert as_table() in (ROOT / "docs" / "models.md").read_text()
