"""docs/what-fits.md is made of its answers, and these are what a plan says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.helpers.planning import asked
from torchtune_adaptive.cli.plan_options import plan_command
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides
from torchtune_adaptive.recipe.versions import require_supported_versions

DOCS = Path(__file__).parents[2] / "docs"
MADE = runpy.run_path(str(DOCS / "make" / "what_fits.py"))
CASES = {(case.model, case.method): case for case in MADE["CASES"]}


def test_the_page_is_made_of_its_answers() -> None:
    made = MADE["page"](MADE["answers"]())
    assert (DOCS / "what-fits.md").read_text() == made, (
        "run: python docs/make/what_fits.py > docs/what-fits.md"
    )


def test_an_answer_is_what_a_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The cheapest of them, with what the page says to type."""
    row = next(
        row for row in MADE["answers"]() if MADE["key_of"](row) == ("Llama 3.2 1B", "full", 1, 2048)
    )
    (answer, *_) = row["devices"]
    words = CASES[row["model"], row["method"]].words().split()
    words += ["--gpu", "4090", "--seq-len", "2048", "--no-what-ifs"]
    require_supported_versions()
    plan_command(asked([*words, f"batch_size={answer['largest']}", "--json"]))
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["name"] == answer["gpu"]
    assert (found["largest"], found["verdict"]) == (answer["largest"], answer["verdict"])
    assert found["configured"]["reserved"] == pytest.approx(answer["reserved"], rel=0.01)
    speed = found["tokens_per_second_per_gpu"]
    assert speed == pytest.approx(answer["tokens_per_second_per_gpu"], rel=0.02)


@pytest.mark.parametrize("name", CASES, ids=" ".join)
def test_every_case_can_be_planned(name: tuple[str, str]) -> None:
    config, *overrides = CASES[name].words().split()
    plan = plan_request(with_overrides(load_config(config), overrides), 8, "h100", length=2048)
    assert plan.asked.kind.adapters is (name[1] != "full")
    assert plan.asked.quantized_weights is (name[1] == "QLoRA")
