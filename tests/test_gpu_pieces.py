"""``make gpu``: pieces are run once in the time that there is, the failed ones again, and each is reported as
soon as it has ended. What a machine without network needs for them is small."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import requires, version
from math import inf
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from packaging.requirements import Requirement

from torchtune_adaptive import __version__
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.step.knobs import MICRO_BATCH, OFFLOADING
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.knob_table import choices
from torchtune_adaptive.recipe.versions import REASONS

ROOT = Path(__file__).parents[1]
CALLS, SECONDS, START = 5, 540.0, 15.0
"""Calls that all pieces should fit into, and the seconds that it may take until the first piece begins."""


def benchmark(name: str, patch: pytest.MonkeyPatch) -> Any:
    """A file of ``benchmarks`` as a module; they import each other by name."""
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        yield benchmark("gpu", patch)


def count(path: Path, code: str = "0") -> str:
    """A command that leaves a mark, says something and ends with ``code``."""
    return f"-c \"open('{path}', 'a').write('x'); print('1.5 GiB'); raise SystemExit({code})\""


class TestPieces:
    @pytest.fixture
    def pieces(self, gpu: Any, tmp_path: Path) -> list[Any]:
        flag = tmp_path / "memory is there"
        failing = f"0 if __import__('os').path.exists('{flag}') else 3"
        return [
            gpu.Piece("good", count(tmp_path / "good"), 200),
            gpu.Piece("fails at first", count(tmp_path / "fails", failing), 200),
            gpu.Piece("last", count(tmp_path / "last"), 200),
        ]

    def call(
        self,
        gpu: Any,
        pieces: list[Any],
        folder: Path,
        machine: str = "a GPU",
        seconds: float = inf,
        only: tuple[str, ...] = (),
    ) -> bool:
        progress = gpu.Progress(folder / "build" / "state.json", machine)
        ends = time.monotonic() + seconds
        return gpu.run_all(pieces, progress, folder / "docs" / "gpu.md", ends, only)

    def runs(self, folder: Path) -> list[int]:
        paths = [folder / name for name in ("good", "fails", "last")]
        return [len(path.read_text()) if path.exists() else 0 for path in paths]

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

    def test_results_of_other_sources_are_kept_only_where_asked(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        path = tmp_path / "state.json"
        progress = gpu.Progress(path, "a GPU", "old")
        for piece, code in zip(pieces, (0, 3, 0), strict=True):
            progress.add(piece, gpu.Result(piece.command, code, 1.0, ""))
        assert gpu.Progress(path, "a GPU", "new").left(pieces) == pieces
        kept = gpu.Progress(path, "a GPU", "new", keep=True)
        assert kept.left(pieces) == pieces[1:2], "what failed is run again"
        kept.add(pieces[1], gpu.Result(pieces[1].command, 0, 1.0, ""))
        ended = [row.split("|")[-2] for row in gpu.table(pieces, kept).splitlines()[2:]]
        assert ["sources old" in each for each in ended] == [True, False, True]
        assert "a GPU, sources new" in gpu.table(pieces, kept)

    def test_a_piece_that_changed_is_run_again(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        self.call(gpu, pieces[:1], tmp_path)
        changed = gpu.Piece("good", pieces[0].command + " --more", 200)
        assert self.call(gpu, [changed], tmp_path)
        assert len((tmp_path / "good").read_text()) == 2

    def test_a_damaged_state_is_begun_anew(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        self.call(gpu, pieces[:1], tmp_path)
        (tmp_path / "build" / "state.json").write_text('{"machine": "a GPU", "resu')
        assert self.call(gpu, pieces[:1], tmp_path)
        assert len((tmp_path / "good").read_text()) == 2

    @pytest.mark.alternating
    def test_a_piece_has_its_time_and_no_more(self, gpu: Any) -> None:
        code = "import time; print('begun', flush=True); time.sleep(600)"
        result = gpu.run(gpu.Piece("slow", f'-c "{code}"', 5))
        assert result.exit_code is None and result.seconds < 300
        assert result.output == "begun\n" and "stopped after" in result.ended

    @pytest.mark.alternating
    def test_what_a_stopped_piece_had_found_is_kept(
        self, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where the next attempt fails before it comes as far."""
        flag = tmp_path / "second"
        said = "import os, sys, time; from gpu_facts import tell; tell('small', '1 GiB'); "
        said += f"second = os.path.exists('{flag}'); open('{flag}', 'w'); second and sys.exit(3); "
        said += "tell('large', '2 GiB'); time.sleep(600)"
        piece = gpu.Piece("slow", f'-c "{said}"', 10)
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
        monkeypatch.setenv(gpu.ASKED, "1")
        progress = gpu.Progress(tmp_path / "state.json", "a GPU")
        for ended in ("stopped after", "exit 3"):
            assert not gpu.run_all([piece], progress, tmp_path / "gpu.md", inf, ())
            progress = gpu.Progress(tmp_path / "state.json", "a GPU")
            result = progress.result(piece)
            assert ended in result.ended and "FACT" not in result.output
            assert result.earlier | result.facts == {"small": "1 GiB", "large": "2 GiB"}
        report = (tmp_path / "gpu.md").read_text()
        assert (
            "| | small | 1 GiB |" in report and "| | large | 2 GiB (in an earlier run) |" in report
        )

    def test_what_a_piece_has_found_is_kept_where_the_call_is_ended(
        self, gpu: Any, tmp_path: Path
    ) -> None:
        said = "from gpu_facts import tell; import time; tell('small', '1 GiB'); time.sleep(600)"
        path, command = tmp_path / "state.json", f'-c "{said}"'
        call = (
            f"import gpu; from pathlib import Path; piece = gpu.Piece('slow', {command!r}, 500); "
            f"progress = gpu.Progress(Path({str(path)!r}), 'a GPU'); "
            f"gpu.run_all([piece], progress, Path({str(tmp_path / 'gpu.md')!r}), 1e12, ())"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks"), gpu.ASKED: "1"}
        with subprocess.Popen([sys.executable, "-c", call], env=environment) as calling:
            ends = time.monotonic() + 60
            while not path.exists() and time.monotonic() < ends:
                time.sleep(0.1)
            pieces = psutil.Process(calling.pid).children(recursive=True)
            calling.kill()
            for process in pieces:  # which would go on until their limit
                process.kill()
        result = gpu.Progress(path, "a GPU").result(gpu.Piece("slow", command, 500))
        assert result.facts == {"small": "1 GiB"} and result.exit_code is None

    def test_the_table_says_what_was_not_measured(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        self.call(gpu, pieces, tmp_path, only=("good",))
        progress = gpu.Progress(tmp_path / "build" / "state.json", "a GPU")
        table = gpu.table(pieces, progress).splitlines()
        assert table[0] == "| a GPU | | |" and table[-1] == "| last | | not measured |"
        assert table[2].startswith("| good | | passed, ")
        assert "\n".join(table) in (tmp_path / "docs" / "gpu.md").read_text()

    @pytest.mark.exhaustive  # half a minute, of waiting
    def test_tests_are_counted_as_they_end(self, gpu: Any, tmp_path: Path) -> None:
        """Without the plugins that are installed, and although one of them is stopped."""
        (tmp_path / "test_some.py").write_text(
            "import time, warnings\n"
            "def test_good(): warnings.warn('of torch')\n"
            "def test_bad(): assert False\n"
            "def test_slow(): time.sleep(600)\n"
        )
        options = gpu.all_pieces("cuda")[0].command.split("--exhaustive ")[1].rpartition(" ")[0]
        command = f"-m pytest -c {ROOT / 'pyproject.toml'} {options} {tmp_path / 'test_some.py'}"
        result = gpu.run(gpu.Piece("tests", command, 30))
        facts = gpu.shown(result.facts)
        assert facts == {"tests": "1 failed, 1 passed", "test_bad": "failed"}, result.output

    def test_a_test_that_passes_at_last_has_not_failed(self, gpu: Any, tmp_path: Path) -> None:
        progress = gpu.Progress(tmp_path / "state.json", "a GPU")
        piece = gpu.Piece("tests", "-m pytest", 30)
        for first, second in (("failed", "passed"), ("passed", "failed")):
            facts = {"test_a.py::test_a": first, "test_a.py::test_b": second}
            progress.add(piece, gpu.Result("-m pytest", 1, 1.0, "", facts))
        table = gpu.table([piece], progress)
        assert "1 failed, 1 passed" in table
        assert "test_b | failed" in table and "test_a" not in table

    @pytest.mark.parametrize(
        "line",
        ['FACT ["small", "1 GiB"]UserWarning: x', 'UserWarning: FACT ["small", "1 GiB"]'],
    )
    def test_a_line_that_others_have_printed_into_is_read_and_shown(
        self, gpu: Any, line: str
    ) -> None:
        assert gpu.told(line) == {"small": "1 GiB"} and not gpu.is_fact(line)
        assert gpu.told('FACT ["smUserWarning: xall", "1') == {}
        assert gpu.is_fact('FACT ["small", "1 GiB"]\n')

    def test_a_piece_that_would_not_end_in_time_is_not_begun(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        long = gpu.Piece("fails at first", pieces[1].command, 1000)
        assert not self.call(gpu, [pieces[0], long, pieces[2]], tmp_path, seconds=500)
        assert self.runs(tmp_path) == [1, 0, 1], "what comes after it may be shorter"
        report = (tmp_path / "docs" / "gpu.md").read_text()
        assert "\nNot reached: fails at first.\n" in report and "not run yet" in report

    def test_what_failed_comes_after_what_was_not_reached(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        self.call(gpu, pieces[:2], tmp_path)
        progress = gpu.Progress(tmp_path / "build" / "state.json", "a GPU")
        assert [piece.name for piece in progress.left(pieces)] == ["last", "fails at first"]
        assert "\nFailed: fails at first.\n" in (tmp_path / "docs" / "gpu.md").read_text()

    def test_only_what_is_asked_for_is_run(
        self, gpu: Any, pieces: list[Any], tmp_path: Path
    ) -> None:
        assert self.call(gpu, pieces, tmp_path, only=("LAST", "goo"))
        assert self.runs(tmp_path) == [1, 0, 1]


def test_all_pieces_fit_into_five_calls_and_name_what_exists(gpu: Any) -> None:
    pieces = gpu.all_pieces("cuda")
    assert len({piece.name for piece in pieces}) == len(pieces)
    for piece in pieces:
        path = next(part for part in piece.command.split() if "/" in part)
        assert (ROOT / path).exists(), piece
    for _ in range(CALLS):
        seconds = SECONDS - START
        for piece in list(pieces):
            if piece.limit <= seconds:
                seconds -= piece.limit
                pieces.remove(piece)
    assert not pieces


def test_pieces_come_in_the_order_of_what_we_most_want_to_know(gpu: Any) -> None:
    names = [piece.name for piece in gpu.all_pieces("cuda")]
    kinds = [
        "Tests",
        "A step",
        "Prediction",
        "Sizes found",
        "Fastest",
        "Token budget",
        "Prediction",
    ]
    for kind in kinds:
        assert names and names[0].startswith(kind)
        while names and names[0].startswith(kind):
            del names[0]
    assert not names


def test_pieces_are_listed_where_there_is_no_gpu(gpu: Any, tmp_path: Path) -> None:
    program = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--out", tmp_path]
    listed = subprocess.run(
        [*program, "--list"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert len(listed.stdout.splitlines()) == len(gpu.all_pieces("cuda"))


@pytest.mark.exhaustive
def test_a_step_is_measured_on_a_cpu(gpu: Any) -> None:
    [piece] = [piece for piece in gpu.all_pieces("cpu") if piece.name == "A step"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(gpu.ASKED, "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        result = gpu.run(piece)
    assert result.exit_code == 0, result.output
    compared = result.facts["bits of a step that was done again"]
    found = re.match(r"(\d+) of (\d+) gradients .*; (\d+) those of", compared)
    assert found is not None and found[1] == found[2] != found[3], compared
    steps = [what for what in result.facts if what.endswith("ms a step")]
    assert len(steps) == 5, "three loops beside plain, and two failures"


def test_a_call_needs_no_more_than_torch(gpu: Any, tmp_path: Path) -> None:
    """Neither this package nor git; what pieces need is their own affair."""
    ended = subprocess.run(
        [sys.executable, "-S", ROOT / "benchmarks" / "gpu.py", "--list", "--device", "cpu"],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(torch_alone(tmp_path / "site"))},
        check=True,
        capture_output=True,
        text=True,
    )
    assert len(ended.stdout.splitlines()) == len(gpu.all_pieces("cpu"))


def torch_alone(folder: Path) -> Path:
    folder.mkdir()
    (folder / "torch.py").write_text('__version__ = "2.11.0"')
    return folder


def test_sources_have_one_name_until_they_change(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    file = tmp_path / "benchmarks" / "gpu.py"
    file.write_text("1")
    before = gpu.sources()
    (tmp_path / "benchmarks" / "notes.txt").write_text("nothing that runs")
    assert gpu.sources() == before
    file.write_text("2")
    assert gpu.sources() != before


@pytest.mark.parametrize(
    ("predicted", "fit", "found"),
    [
        (45, 45, "45"),
        (45, 44, "44"),
        (45, 47, "47"),
        (45, 60, "48 or more"),
        (45, 30, "fewer than 42"),
        (2, 0, "fewer than 1"),
        (0, 0, "fewer than 1"),
        (0, 1, "1"),
    ],
)
def test_the_largest_size_is_looked_for_near_the_predicted_one(
    predicted: int, fit: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = benchmark("gpu_plan", monkeypatch)
    assert plan.largest_near(predicted, lambda rows: rows <= fit) == found


def test_every_choice_on_a_gpu_is_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or configurations would be measured as others than they are."""
    fastest = benchmark("gpu_fastest", monkeypatch)
    case = fastest.FASTEST["1B"]
    possible = choices(
        Asked.of(fastest.config_for(case, "cuda")), 1, "rounding", switches_only=True
    )
    varied = {key for key in possible[0] if len({str(choice[key]) for choice in possible}) > 1}
    assert OFFLOADING in varied
    step = fastest.build_step(fastest.config_for(case, "cpu"), 1, SimulatedMemory(None))
    try:
        assert varied - {MICRO_BATCH} <= set(step.options.switches.choice)
        assert all(parameter.float().std() > 0.01 for parameter in step.model.parameters())
        tokens = fastest.random_batch(step, 2, 64)["tokens"]
        assert len(tokens.unique()) > 32
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["1B full, 1 of 8", "8B LoRA, checkpointed"])
def test_a_peak_is_the_same_after_a_size_that_does_not_fit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a backward pass has left that ran out of memory is no part of the next one."""
    plan = benchmark("gpu_plan", monkeypatch)
    case = replace(plan.PREDICTED[name], length=128)
    measuring = plan.Measuring(case, "cpu", 128 << 20)
    try:
        expected, larger = measuring.usage(2), measuring.usage(8)
        begun = measuring.memory.in_use()
        for share in (0.9999, 0.9, 0.7):  # in backward, and before it
            limit = begun + int((larger.peak_bytes - begun) * share)
            with measuring.memory.capped(limit):
                assert measuring.usage(8) is None
                assert measuring.usage(2) == expected
    finally:
        dist.destroy_process_group()


@pytest.mark.exhaustive
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_what_a_machine_without_network_needs_is_small(python: str, tmp_path: Path) -> None:
    """It takes a registry, as making ``.venv`` does."""
    program = ROOT / "benchmarks" / "wheels.py"
    subprocess.run([sys.executable, program, tmp_path, "--python", python], check=True, timeout=300)
    wheels = list(tmp_path.glob("*.whl"))
    assert sum(wheel.stat().st_size for wheel in wheels) < 20 << 20
    assert {"torchtune", "stand_ins", "torchtune_adaptive"} <= {
        w.name.split("-")[0] for w in wheels
    }


def test_stand_ins_have_any_name_and_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = benchmark("wheels", monkeypatch)
    wheels.write_wheel(tmp_path, "stand_ins", "0", ["no_data", "no_data.distributed"])
    monkeypatch.syspath_prepend(str(next(tmp_path.glob("*.whl"))))
    assert importlib.import_module("no_data.distributed").split_by_node is not None
    assert version("stand_ins") == "0"
    assert wheels.our_version() == __version__


def test_the_stand_in_of_this_package_has_its_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or recipes could not tell which versions they support."""
    wheels = benchmark("wheels", monkeypatch)
    needed = wheels.needed()
    wheels.write_wheel(tmp_path, "needy", "0", needed=needed)
    monkeypatch.syspath_prepend(str(next(tmp_path.glob("*.whl"))))
    assert requires("needy") == needed
    assert {Requirement(each).name for each in needed} >= REASONS.keys()
