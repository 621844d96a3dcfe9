"""``make gpu``: pieces are run once, the failed ones again, and each is reported as soon as it has ended."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpu() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_pieces", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def count(path: Path, code: str = "0") -> str:
    """A command that leaves a mark, says something and ends with ``code``."""
    return f"-c \"open('{path}', 'a').write('x'); print('1.5 GiB'); raise SystemExit({code})\""


class TestPieces:
    @pytest.fixture
    def pieces(self, gpu: Any, tmp_path: Path) -> list[Any]:
        flag = tmp_path / "memory is there"
        failing = f"0 if __import__('os').path.exists('{flag}') else 3"
        return [
            gpu.Piece("good", count(tmp_path / "good")),
            gpu.Piece("fails at first", count(tmp_path / "fails", failing)),
            gpu.Piece("last", count(tmp_path / "last")),
        ]

    def call(self, gpu: Any, pieces: list[Any], folder: Path, machine: str = "a GPU") -> bool:
        progress = gpu.Progress(folder / "build" / "state.json", machine)
        return gpu.run_all(pieces, progress, folder / "docs" / "gpu.md", 20.0)

    def runs(self, folder: Path) -> list[int]:
        return [len((folder / name).read_text()) for name in ("good", "fails", "last")]

    def test_a_call_continues_where_the_last_one_stopped(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        assert not self.call(gpu, pieces, tmp_path)
        assert self.runs(tmp_path) == [1, 1, 1], "a failure does not keep the others from running"
        report = (tmp_path / "docs" / "gpu.md").read_text()
        assert "a GPU" in report and "exit 3" in report and report.count("\n1.5 GiB\n") == 3
        (tmp_path / "memory is there").touch()
        assert self.call(gpu, pieces, tmp_path)
        assert self.runs(tmp_path) == [1, 2, 1]
        assert "exit 3" not in (tmp_path / "docs" / "gpu.md").read_text()
        assert self.call(gpu, pieces, tmp_path)
        assert self.runs(tmp_path) == [1, 2, 1]

    def test_results_of_another_machine_are_not_mixed_in(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        self.call(gpu, pieces[:1], tmp_path)
        assert self.call(gpu, pieces[:1], tmp_path, machine="another GPU")
        assert len((tmp_path / "good").read_text()) == 2

    def test_a_piece_that_changed_is_run_again(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        self.call(gpu, pieces[:1], tmp_path)
        changed = gpu.Piece("good", pieces[0].command + " --more")
        assert self.call(gpu, [changed], tmp_path)
        assert len((tmp_path / "good").read_text()) == 2

    def test_a_damaged_state_is_begun_anew(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        self.call(gpu, pieces[:1], tmp_path)
        (tmp_path / "build" / "state.json").write_text('{"machine": "a GPU", "resu')
        assert self.call(gpu, pieces[:1], tmp_path)
        assert len((tmp_path / "good").read_text()) == 2

    def test_a_piece_has_its_time_and_no_more(self, gpu: Any) -> None:
        slow = gpu.Piece("slow", "-c \"import time; print('begun', flush=True); time.sleep(60)\"")
        result = gpu.run(slow, 1.0)
        assert result.exit_code is None and result.seconds < 15
        assert result.output == "begun\n" and "stopped after" in result.ended

    def test_every_piece_fits_in_the_time_that_a_machine_is_lent(self, gpu: Any) -> None:
        assert gpu.LIMIT < 9 * 60
        names = [piece.name for piece in gpu.PIECES]
        assert len(set(names)) == len(names)
        for piece in gpu.PIECES:
            path = next(part for part in piece.command.split() if "/" in part)
            assert (ROOT / path).exists(), piece
