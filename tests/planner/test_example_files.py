"""Which example files of other trainers are planned, as the records in tests/data have it."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.helpers.program_commands import run
from tests.helpers.results import EXAMPLE_FILES, RESULTS

DATA = EXAMPLE_FILES.parent
RECORDS: dict[str, dict[str, str]] = {
    "Axolotl": json.loads(EXAMPLE_FILES.read_text()),
    "LLaMA-Factory": json.loads((DATA / "example_files_llama_factory.json").read_text()),
    "TRL": json.loads((DATA / "example_scripts_trl.json").read_text()),
}
ELSEWHERE = ("cut_cross_entropy", "processor_type", "torchao", "qat:", "torch_4bit", "torch_8bit")
"""What files have that need what ``beside_axolotl`` does not have."""
AT_ONCE, EVERY = 3, 12


@pytest.mark.parametrize("trainer", RECORDS)
def test_the_page_has_the_counts_of_the_record(trainer: str) -> None:
    page = (RESULTS / "example-files.md").read_text()
    section = page.partition(f"\n## {trainer}\n")[2].partition("\n## ")[0]
    outcomes = [*RECORDS[trainer].values()]
    assert f"| planned | {outcomes.count('planned')} |" in section
    assert f"| all | {len(outcomes)} |" in section


def examples(python: Path, package: str, folder: Path) -> Path:
    """The example files of a package's source distribution."""
    pip = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", folder, package], check=True, timeout=600)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return next(folder.glob("*/examples"))


@pytest.mark.exhaustive
@pytest.mark.runs
def test_files_of_axolotl(beside_axolotl: Path, shard: int, tmp_path: Path) -> None:
    folder = examples(beside_axolotl, "axolotl==0.19.0", tmp_path)
    planned = [
        name
        for name, outcome in RECORDS["Axolotl"].items()
        if outcome == "planned" and not any(one in (folder / name).read_text() for one in ELSEWHERE)
    ]
    begin = shard * AT_ONCE % len(planned)
    names = (planned + planned)[begin : begin + AT_ONCE]
    words = ("-m", "tests.helpers.example_files", str(folder), "found.jsonl", *names)
    done = run(beside_axolotl, tmp_path, *words)
    found = dict(map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines()))
    assert found == dict.fromkeys(names, "planned"), done.stderr[-3000:]


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.parametrize("first", range(EVERY))
def test_files_of_llama_factory(first: int, tmp_path: Path, beside_llama_factory: Path) -> None:
    folder = examples(beside_llama_factory, "llamafactory==0.9.5", tmp_path)
    words = (str(folder), "found.jsonl", str(EVERY), str(first))
    done = run(beside_llama_factory, tmp_path, "-m", "tests.helpers.llama_factory_files", *words)
    found = dict(map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines()))
    assert found, done.stderr[-3000:]
    for name, outcome in found.items():
        if "pip install" not in outcome:  # a package that is not there
            recorded = RECORDS["LLaMA-Factory"][name]
            assert (outcome == "planned") == (recorded == "planned"), outcome
