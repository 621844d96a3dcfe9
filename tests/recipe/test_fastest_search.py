"""The fastest configuration on devices whose time is modelled: it is that of brute force.

``cpu`` is the simulated device. ``cuda`` is what a config says whose card is a stand-in: it has the choices
of CUDA, and the memory of a caching allocator.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.helpers.fastest import (
    LENGTH,
    PLENTY,
    ROWS,
    Run,
    run_of,
)
from tests.helpers.knobs import differs
from tests.helpers.ranks import run_ranks
from torchtune_adaptive.common.errors import ConfigError, NothingFits
from torchtune_adaptive.core.device.memory import Usage
from torchtune_adaptive.core.step.knobs import (
    CHECKPOINT,
    MICRO_BATCH,
    OFFLOADING,
    Choice,
    first_layers,
)
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.search.fastest_report import FastestReport
from torchtune_adaptive.recipe.search.fastest_search import (
    _Trials,
    find_fastest,
    possible_choices,
    to_begin_with,
)
from torchtune_adaptive.recipe.settings.knob_table import changes, rough_cost
from torchtune_adaptive.recipe.setup import offloading

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]


def step_of(run: Run) -> TrainStep:
    return run[0].step


def every_choice(
    run: Run, timed: bool = True, of_size: int | None = None
) -> dict[Choice, tuple[Usage, float]]:
    """Memory and, if they are timed, seconds: of all choices, or of those with this micro-batch."""
    found = {}
    prober, rows = run
    worst = prober.worst_case(rows.data, rows.lengths, LENGTH)
    choices = [
        choice for choice in possible_choices(prober) if of_size in (None, choice[MICRO_BATCH])
    ]
    clock: Any = prober.step.memory
    with _Trials(prober, rows, worst, choices[0], choices[:1]) as trials:
        for choice in choices:
            clock.runs = False
            assert trials.fits(choice)
            usage = trials.last.usage
            clock.runs = timed
            (seconds,) = trials.time(choice, 1) or () if timed else (0.0,)
            found[choice] = (usage, seconds)
    clock.runs = True
    return found


def compared_with_brute_force(
    device: str, kind: str, may_change: str, limits: int, sample: int, offset: int
) -> tuple[int, list[str]]:
    """How many limits were tried, and the choices that were not the fastest that fits.

    What an allocator reserves on a card depends on how earlier trials have cut its segments. So what is
    chosen must have fitted in its own trial, with tensors that fit in any, and nothing faster may fit with
    3 % to spare.
    """
    differ = 0.03 if device == "cuda" else 0.0
    run, _ = run_of(device, kind, may_change=may_change)
    memory: Any = step_of(run).memory
    own = step_of(run).options.switches.choice
    table = every_choice(run)
    ranked = sorted(
        ((choice, seconds) for choice, (_, seconds) in table.items()), key=lambda one: one[1]
    )
    peaks = sorted(usage.peak_bytes for usage, _ in table.values())
    wrong, tried = [], 0
    for number in range(offset % sample, limits, sample):
        memory.limit = int(peaks[0] + (peaks[-1] * 1.05 - peaks[0]) * number / (limits - 1))
        step_of(run).switch(own)
        report = find_fastest(*run, rank=lambda length, capacity: ranked)
        chosen, trial = report.chosen, report.tried[report.chosen]
        tried += 1
        certain = memory.limit / (1 + differ)
        fitting = [s for usage, s in table.values() if usage.peak_bytes <= certain]
        best = min(fitting, default=float("inf"))
        usage, seconds = table[chosen]
        needed = usage.peak_allocated_bytes if device == "cuda" else usage.peak_bytes
        fits = trial.fits and max(needed, trial.usage.peak_bytes) <= memory.limit
        if not fits or seconds > best * (1 + 1e-9):
            wrong.append(f"{memory.limit}: {chosen} takes {seconds}, not {best}")
    return tried, wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("device", "kind", "may_change", "ranks"),
    [
        ("cpu", "full", "exact", 1),
        ("cuda", "full", "exact", 1),
        ("cpu", "full", "rounding", 1),
        ("cpu", "lora", "rounding", 1),
        ("cpu", "full", "exact", 2),
    ],
)
def test_the_choice_is_that_of_brute_force_at_each_limit(
    device: str, kind: str, may_change: str, ranks: int, exhaustive: bool, shard: int
) -> None:
    often = device == "cpu" and may_change == "exact" and ranks == 1
    limits, sample = 48, (2 if often else 8) if exhaustive else 24
    arguments = (device, kind, may_change, limits, sample, shard)
    for tried, wrong in run_ranks(compared_with_brute_force, ranks, *arguments, timeout=600):
        assert wrong == [] and tried == limits // sample


def without_prediction(device: str, limit_share: float | None) -> tuple[FastestReport, bool]:
    """What is chosen where memory is limited to a share of what the choices need at most."""
    run, trained = run_of(device)
    memory: Any = step_of(run).memory
    own = step_of(run).options.switches.choice
    if limit_share is not None:
        peaks = [usage.peak_bytes for usage, _ in every_choice(run, timed=False).values()]
        step_of(run).switch(own)
    expected = trained.train()
    if limit_share is not None:
        memory.limit = int(max(peaks) * limit_share)
    report = find_fastest(*run)
    memory.limit = PLENTY
    return report, not differs(expected, trained.train())


@pytest.mark.rotating
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("limit_share", [None, 0.8])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_chosen_is_exact_was_tried_and_is_not_slower(
    device: str, ranks: int, limit_share: float | None
) -> None:
    results = run_ranks(without_prediction, ranks, device, limit_share)
    report, _ = results[0]
    assert [each.chosen for each, _ in results] == [report.chosen] * ranks
    assert all(bits for _, bits in results), "training after the choice has the config's bits"
    assert len(report.timed) <= 4 and report.chosen in [each.way for each in report.timed]
    measured = {each.way: each.measured for each in report.timed}
    if report.own in measured:
        assert measured[report.chosen] <= measured[report.own]  # type: ignore[operator]
    assert {change.effect for change in changes(report.own, report.chosen)} <= {"exact"}
    assert report.split.global_batch == ROWS * ranks
    assert all(report.tried[each.way].fits for each in report.timed)
    text = report.text()
    assert "tokens/s per rank" in text and f"global batch unchanged: {ROWS * ranks} rows" in text
    for change in changes(report.own, report.chosen):
        assert str(change) in text
    assert report.overrides().endswith("use_fastest_configuration=False")


def of_twelve_layers(fewest: int) -> tuple[str, int, int]:
    """What is chosen where memory allows no fewer checkpointed layers; the trials, and all choices."""
    run, _ = run_of("cpu", layers=12, may_change=(CHECKPOINT,))
    memory: Any = step_of(run).memory
    table = {one[CHECKPOINT]: usage for one, (usage, _) in every_choice(run, timed=False).items()}
    memory.limit = table[first_layers(fewest, 12)].peak_bytes
    assert table[first_layers(fewest - 1, 12)].peak_bytes > memory.limit
    # Last what keeps operations: it needs less memory here than most, and it is not what this is about.
    ranked = [(one, rough_cost(one)) for one in possible_choices(run[0])]
    order = sorted(ranked, key=lambda one: (one[0][CHECKPOINT] == "operations", one[1]))
    report = find_fastest(*run, rank=lambda length, capacity: order)
    return report.chosen[CHECKPOINT], len(report.tried), len(table)


@pytest.mark.parametrize("fewest", [1, 5, 11])
def test_the_fewest_layers_that_fit_are_found_in_few_trials(fewest: int) -> None:
    [(chosen, tried, possible)] = run_ranks(of_twelve_layers, 1, fewest)
    assert (chosen, possible) == (f"{fewest}_of_12", 14)
    assert tried <= 7


def in_too_little_memory(device: str, may_change: str) -> str:
    run, _ = run_of(device, may_change=may_change)
    memory: Any = step_of(run).memory
    whole = every_choice(run, timed=False, of_size=ROWS)
    memory.limit = min(usage.peak_allocated_bytes for usage, _ in whole.values()) - 1
    try:
        return str(find_fastest(*run).chosen[MICRO_BATCH])
    except ConfigError as error:
        return str(error)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("device", "may_change"), [("cpu", "exact"), ("cuda", "exact"), ("cpu", "rounding")]
)
def test_what_does_not_fit_says_what_would(device: str, may_change: str) -> None:
    (said,) = run_ranks(in_too_little_memory, 1, device, may_change)
    if may_change == "exact":
        assert "batch_size" in said and "may_change=rounding" in said
    else:
        assert int(said) < ROWS


def resumed(device: str, checkpointing: str) -> tuple[int, int, str]:
    run, _ = run_of(device)
    known = possible_choices(run[0])[0] | {CHECKPOINT: checkpointing}
    report = find_fastest(*run, known=dict(known))  # as a checkpoint has it
    return len(report.tried), len(report.timed), step_of(run).options.switches.choice[CHECKPOINT]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("checkpointing", ["3_of_4", "every_2"])  # the latter by an earlier version
def test_a_resumed_run_keeps_its_choice_after_one_trial(device: str, checkpointing: str) -> None:
    assert run_ranks(resumed, 1, device, checkpointing) == [(1, 1, checkpointing)]


def without_host_memory() -> tuple[bool, int, bool]:
    """Whether the leanest choice can offload; how many are tried where the config's own values are known to
    fit, and whether training offloads then."""
    run, _ = run_of("cuda", may_change=(OFFLOADING, CHECKPOINT))
    patch = pytest.MonkeyPatch()
    patch.setattr(offloading, "_NOTICED", 1)
    patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0, total=PLENTY))
    prober, rows = run
    worst = prober.worst_case(rows.data, rows.lengths, LENGTH)
    own, *_ = allowed = possible_choices(prober)
    leanest = to_begin_with(allowed)[-1:]
    assert leanest[0][OFFLOADING]
    try:
        with _Trials(prober, rows, worst, own, leanest):
            offloads = True
    except NothingFits:
        offloads = False
    report = find_fastest(*run, known=dict(own))
    return offloads, len(report.tried), report.chosen[OFFLOADING]


def test_a_host_without_memory_keeps_nothing_from_fitting_but_offloading() -> None:
    assert run_ranks(without_host_memory, 1) == [(False, 1, False)]
