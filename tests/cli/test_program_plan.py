"""``plan train.py``: which words are the program's, and the answer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.programs import written
from torchtune_adaptive.cli.plan_options import add_arguments, parsed, plan_command
from torchtune_adaptive.cli.program_words import split


def asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parsed(parser, words)


@pytest.mark.parametrize(
    ("line", "own", "program"),
    [
        ("train.py --lr 1 --gpu 4090 --json x", "--gpu 4090 --json", "train.py --lr 1 x"),
        (
            "--gpu 4090 -m trl sft --rows=3 --config a.yaml",
            "--gpu 4090 --rows=3",
            "-m trl sft --config a.yaml",
        ),
        ("--gpu 4090 -- train.py --gpu 3", "--gpu 4090", "train.py --gpu 3"),
        ("--gpu 4090 -- -m a.b --json", "--gpu 4090", "-m a.b --json"),
        (
            "torchrun --nproc_per_node 2 train.py --compare h100",
            "--compare h100",
            "torchrun --nproc_per_node 2 train.py",
        ),
        (
            "llama3_1/8B_full --gpu h100 batch_size=2",
            "llama3_1/8B_full --gpu h100 batch_size=2",
            "",
        ),
        ("--hf a/b --gpu h100", "--hf a/b --gpu h100", ""),
        ("axolotl.yaml --gpu h100", "axolotl.yaml --gpu h100", ""),
        ("my_recipe.py --config tiny/full", "my_recipe.py --config tiny/full", ""),
    ],
)
def test_words_after_a_program_are_its_own(line: str, own: str, program: str) -> None:
    assert split(line.split()) == (own.split(), tuple(program.split()))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["there/is_none.py"], "PROGRAM: 'there/is_none.py' is not a file"),
        (["{}", "--assume", "train.py=3"], "--assume: 'train.py=3' is not a place and a value"),
        (["--nproc", "0", "{}"], "--nproc: 0 is not a number of GPUs"),
        (["--rows", "0", "{}"], "--rows: 0 is not a number of rows"),
        (["--max-length", "1", "{}"], "--seq-len: 1 is too short"),
        (["lr=1", "{}"], "plan: 'lr=1' stands before a program"),
        (["tiny/full", "--rows", "3"], "--rows: '3' is for a program"),
        (["tiny/full", "--assume", "train.py:3=1"], "is for a program"),
    ],
)
def test_what_cannot_be_asked(
    tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path))
    assert plan_command(asked(*(word.format(path) for word in words))) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.runs
def test_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path))
    words = ("--gpu", "4090", "--tokens", "1M", "--price", "0.5,1", "--compare", "4090,h100")
    assert plan_command(asked(path, *words)) == 0
    said = capsys.readouterr().out
    assert said.startswith("batch of 8: FITS, peak 74 MiB (+-3%) of")
    for text in (
        f"{path} on rtx4090-24gb",
        "tokens/s per GPU",
        "1M tokens take",
        "On other devices (tokens/s per GPU):",
        f"program: {path}, run to its third step",
        "rows: the longest of the 200 rows that were looked at, 64 tokens",
    ):
        assert text in said, said
    assert plan_command(asked(path, "--memory", "1GiB", "--json")) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["rows"], found["ranks"]) == ("FITS", 8, 1)
    assert found["tokens_in_a_row"] == 64 and 100 < found["largest"] < 1000
