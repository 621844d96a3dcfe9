"""Scripts that nobody edits: ``python -m torchtune_adaptive.adapt``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.runs]

ROOT = Path(__file__).parents[3]
# The trainer comes from where it is defined, and is a subclass; whoever replaced a name would miss both.
SCRIPT = """
import sys
import time
from pathlib import Path

from trl.trainer.sft_trainer import SFTConfig, SFTTrainer
import beside
import tiny


class Mine(SFTTrainer):
    def compute_loss(self, *args, **named):
        beside.calls += 1
        return super().compute_loss(*args, **named)


def main():
    assert sys.argv[1:] == ["--steps", "3"], sys.argv
    assert __name__ == "__main__" and Path(__file__).name == "train.py"
    args = SFTConfig(
        "out", per_device_train_batch_size=8, max_steps=int(sys.argv[2]), logging_steps=1, report_to="none",
        save_strategy="no", use_cpu=True, disable_tqdm=True, dataloader_num_workers=1,
    )
    trainer = Mine(tiny.llama(), args, train_dataset=tiny.sums(64), processing_class=tiny.tokenizer())
    trainer.train()
    assert isinstance(trainer, Mine) and beside.calls
    for row in trainer.state.log_history[:-1]:
        line = f"logged {row['loss']} {row['grad_norm']} {row.get('adaptive/micro_batch')}"
        sys.stdout.write(line + "\\n")  # at once: torchrun's ranks do not buffer what they print
        sys.stdout.flush()
    time.sleep(0.1)  # a thread of gloo that takes Python's lock after its end aborts the process


if __name__ == "__main__":
    main()
"""


def run(folder: Path, *command: str) -> tuple[list[list[str]], str]:
    """The numbers that the script logged, on one rank after the other, and what was said."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("calls = 0\n")
    done = subprocess.run(
        [sys.executable, *command, "--steps", "3"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/examples", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [row.split() for row in re.findall("^logged (.*)$", done.stdout, re.M)], done.stderr


ADAPT = ("-m", "torchtune_adaptive.adapt", "--memory-limit", "8MiB")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["python", "torchrun"])
def test_an_unchanged_script_trains_as_before_in_the_size_that_fits(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    plain, _ = run(tmp_path, *launcher, "train.py")
    ours, said = run(tmp_path, *launcher, *ADAPT, "train.py")
    assert len(ours) == len(plain) == 3 * (2 if launcher else 1)
    for one, other in zip(ours, plain, strict=True):
        assert [*map(float, one[:2])] == pytest.approx([*map(float, other[:2])], rel=1e-4)
        assert other[2] == "None" and int(one[2]) < 8
    assert said.count("torchtune_adaptive: Mine of train.py is made adaptive\n") == 1
    assert said.count(" 8 rows a step") == 1


def test_modules_run_too(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, *ADAPT, "-m", "train")
    assert len(rows) == 3 and all(int(row[2]) < 8 for row in rows)
