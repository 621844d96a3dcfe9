"""The pages of what others have published."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.benchmarks import benchmark
from torchtune_adaptive.planner.speed.speed import EAGER_BAND, SLOWEST_EXPERTS


def test_the_page_of_peaks_is_made_from_the_result() -> None:
    script = benchmark("published")
    assert script["RESULT"].with_suffix(".md").read_text() == script["compared"]()


def test_the_page_of_throughputs_is_made_from_the_result() -> None:
    script = benchmark("published_speeds")
    file = script["RESULT"]
    made = script["page"](json.loads(file.read_text()), script["THROUGHPUTS"])
    assert file.with_suffix(".md").read_text() == made


def test_the_page_of_steps_on_rtx_4090_is_made_from_the_result() -> None:
    script = benchmark("published_4090")
    file = script["RESULT"]
    made = script["page"](json.loads(file.read_text()), script["NUMBERS"])
    assert file.with_suffix(".md").read_text() == made
    assert [run.name for run in script["RUNS"]] == [*script["NUMBERS"]]


def test_the_page_of_models_with_experts_is_made_from_the_result() -> None:
    script = benchmark("published_experts")
    result = json.loads(script["RESULT"].read_text())
    made = script["page"](result, script["SLOWEST_EXPERTS"])
    assert script["RESULT"].with_suffix(".md").read_text() == made
    assert [run.name for run in script["RUNS"]] == [one["run"] for one in result["runs"]]


def test_steps_of_a_model_with_experts_are_predicted_in_the_right_order() -> None:
    script = benchmark("published_experts_page")
    result = json.loads(benchmark("published_experts")["RESULT"].read_text())
    series: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for one in script["compared"](result):
        if one.measured and one.table == script["UNSLOTH"]:
            name = one.run.rpartition(",")[0]
            series.setdefault((name, one.again), []).append((one.ms, one.measured[1]))
    assert {name: len(steps) for name, steps in series.items()} == {
        ("gpt-oss-20b, rank 64", False): 4,
        ("gpt-oss-20b, rank 8", False): 4,
        ("gpt-oss-20b, rank 8", True): 4,
        ("Qwen3-30B-A3B, rank 64", False): 5,
        ("Qwen3-30B-A3B, rank 64", True): 5,
        ("Qwen3-30B-A3B, rank 8", False): 5,
    }
    for steps in series.values():
        assert sorted(ms for ms, _ in steps) == [
            ms for ms, _ in sorted(steps, key=lambda one: one[1])
        ]


def test_the_band_of_experts_holds_published_steps() -> None:
    """However many settings their sources leave open."""
    script = benchmark("published_experts_page")
    result = json.loads(benchmark("published_experts")["RESULT"].read_text())
    times = [one.times for one in script["compared"](result) if one.measured]
    assert len(times) == 29
    assert all(1 + SLOWEST_EXPERTS <= 1 / one <= 1 + EAGER_BAND[1] for one in times)


def test_the_parts_of_a_step_follow_from_two_sizes() -> None:
    page = benchmark("published_speeds_page")

    def run(rows: int, gpus: int, published: float, predicted: float) -> Any:
        """A run whose step takes so many seconds."""
        speed = rows * 4096 / published, rows * 4096 / predicted
        return page["Compared"]("", f"Model full, none, {gpus} x {rows}", *speed, (-1, 1), True)

    # A row takes 1.0 s, and is predicted at 0.9 s; the rest 0.5 s, and 0.2 s.
    runs = [run(rows, 1, rows + 0.5, 0.9 * rows + 0.2) for rows in (8, 4, 16)]
    [found] = page["parts_of"]([*runs, run(4, 2, 9.0, 9.0)])
    assert (found.name, found.gpus) == ("Model full, none", 1)
    assert tuple(found.published) == pytest.approx((1.0, 0.5))
    assert tuple(found.predicted) == pytest.approx((0.9, 0.2))
    assert found.longer == pytest.approx(1 / 0.9 - 1) and found.more == pytest.approx(0.3)
    assert found.error == pytest.approx(-0.1)


def test_the_band_is_wider_where_memory_is_fragmented() -> None:
    """By what is published, 0.5 GiB of it the CUDA context's."""
    page = benchmark("published_reserved")
    table, mib = page["FMS"], 1 << 20
    names = ("full, none, 1 x 4", "QLoRA, none, 1 x 4", "full, none, 2 x 4", "full, foak, 1 x 4")
    rows = [{"table": table, "row": f"Model {name}", "reserved": 1000 * mib} for name in names]
    known = {f"Model {name}": 1050 + 512 + 1024 * ("2 x" in name) for name in names}
    found = page["reserved"](rows, {table: known})
    assert [one.row for one in found] == [f"Model {name}" for name in names[:3]]
    assert [one.published for one in found] == [1050 * mib] * 3
    assert [one.is_inside(one.predicted) for one in found] == [False, True, True]
    assert not found[1].is_inside(1090 * mib), "too high by more than 3 %"
