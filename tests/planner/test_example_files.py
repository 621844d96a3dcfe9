"""Which of Axolotl's example files are planned, as tests/data/example_files.json has it."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.program_commands import run
from tests.helpers.results import EXAMPLE_FILES, RESULTS

RECORD: dict[str, str] = json.loads(EXAMPLE_FILES.read_text())
ELSEWHERE = ("cut_cross_entropy", "processor_type", "torchao", "qat:", "torch_4bit", "torch_8bit")
"""What files have that need what ``beside_axolotl`` does not have."""
AT_ONCE = 3


def test_the_page_has_the_counts_of_the_record() -> None:
    rows = re.findall(
        r"^\| (.*) \| (\d+) \|$", (RESULTS / "example-files.md").read_text(), re.MULTILINE
    )
    counts = Counter(RECORD.values())
    assert {name: int(count) for name, count in rows} == {**counts, "all": counts.total()}


@pytest.fixture(scope="module")
def examples(beside_axolotl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example files of Axolotl's source distribution."""
    folder = tmp_path_factory.mktemp("axolotl")
    pip = [beside_axolotl, "-m", "pip", "download", "--quiet", "--no-deps"]
    options = ["--no-binary", ":all:", "--dest", folder, "axolotl==0.19.0"]
    subprocess.run([*pip, *options], check=True, timeout=600)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / "axolotl-0.19.0" / "examples"


@pytest.mark.exhaustive
@pytest.mark.runs
def test_files_that_are_planned_still_are(
    examples: Path, beside_axolotl: Path, shard: int, tmp_path: Path
) -> None:
    planned = [
        name
        for name, outcome in RECORD.items()
        if outcome == "planned"
        and not any(one in (examples / name).read_text() for one in ELSEWHERE)
    ]
    begin = shard * AT_ONCE % len(planned)
    names = (planned + planned)[begin : begin + AT_ONCE]
    words = ("-m", "tests.helpers.example_files", str(examples), "found.jsonl", *names)
    done = run(beside_axolotl, tmp_path, *words)
    found = dict(map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines()))
    assert found == dict.fromkeys(names, "planned"), done.stderr[-3000:]
