"""Plans of programs that use real trainers are those that the trainers' settings give."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.real_trainers import CASES

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

HELPERS = Path(__file__).parents[1] / "helpers"
DIFFERENT = {
    name: "only tokens of completions have logits on GPUs, and settings give all of them"
    for name, case in CASES.items()
    if case["trainer"] == "DPOTrainer"
}
"""Cases that a program plans otherwise, and rightly."""
PARTS = 12
"""A few cases each, as a case takes a minute."""


def is_alone(name: str) -> bool:
    """Whether a case has one device, and needs neither Liger nor FlashAttention."""
    others = ("ranks", "use_liger_kernel", "packing", "padding_free")
    return not any(CASES[name].get(other) for other in others)


NAMES = [name for name in CASES if is_alone(name) and name not in DIFFERENT]


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
        assert run == pytest.approx(known, rel=0.001), name
