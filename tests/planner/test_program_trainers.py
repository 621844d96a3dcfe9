"""Plans of programs that use real trainers are those that the trainers' settings give."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.real_trainers import CASES

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

HELPERS = Path(__file__).parents[1] / "helpers"
PARTS = 20
"""A few cases each, as a case takes a minute."""


def is_compared(case: dict[str, Any]) -> bool:
    """Whether a case needs no Liger, and has no experts one by one, whose tokens follow from weights."""
    return not case.get("use_liger_kernel") and case.get("experts_implementation") != "eager"


NAMES = [name for name, case in CASES.items() if is_compared(case)]


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_take_what_their_settings_say(part: int, beside_trl: Path, tmp_path: Path) -> None:
    for name in ("program_trainer.py", "real_programs.py", "real_trainers.py"):
        shutil.copy(HELPERS / name, tmp_path)
    names = NAMES[part::PARTS]
    done = subprocess.run(
        [beside_trl, "real_programs.py", *names],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results.keys() == {*names}
    for name, (run, known) in results.items():
        # On GPUs only tokens of completions have logits, and settings are taken to give them to all tokens.
        if CASES[name]["trainer"] == "DPOTrainer" and run < known:
            assert run > 0.75 * known, name
        elif CASES[name].get("fsdp"):  # settings have more of what is gathered at the peak
            assert 0.95 * known < run < 1.001 * known, name
        else:
            assert run == pytest.approx(known, rel=0.001), name


SPLIT = """
from transformers import LlamaForCausalLM

LlamaForCausalLM.from_pretrained("model", tp_plan="auto")
"""


def test_a_model_that_is_split_over_ranks_is_refused(beside_trl: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPLIT)
    command = [beside_trl, "-m", "torchtune_adaptive", "plan", "train.py", "--nproc", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode and "tp_plan: a model that from_pretrained splits" in done.stderr
