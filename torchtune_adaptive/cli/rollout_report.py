"""The report of a plan for a run that generates its rows: its phases, their sizes, peaks and times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtune_adaptive.cli.job import Job
from torchtune_adaptive.cli.margin import cautions, peak_of
from torchtune_adaptive.cli.speed_report import band_text, cost_lines, human_seconds
from torchtune_adaptive.common import Block, Paragraph, Table, counted, human_bytes
from torchtune_adaptive.planner import DOES_NOT_FIT, Peak, Speed
from torchtune_adaptive.recipe import PlanRequest, Prediction, RolloutPrediction

_SMALL = 0.01
"""Share of the highest peak below which a part is not listed."""


def rollout_blocks(plan: PlanRequest, found: Prediction, about: str, job: Job) -> list[Block]:
    """The answer, what each phase takes and what of, and the speed; ``about`` is what was asked."""
    rollout = found.rollout
    assert rollout is not None
    answer = [_answer(plan, found, rollout), *_sizes(rollout), *_cautions(plan, rollout), about]
    blocks: list[Block] = [
        Paragraph(answer, important=True),
        _phases(plan, rollout),
        _memory(rollout),
    ]
    if rollout.speed is not None:
        fits = found.verdict(plan.device) != DOES_NOT_FIT
        blocks += _times(rollout, rollout.speed, found.ranks, job, fits)
    return blocks


def _answer(plan: PlanRequest, found: Prediction, rollout: RolloutPrediction) -> str:
    limiting, device = rollout.limiting, plan.device
    takes = peak_of(device, limiting.configured.reserved)
    rows = counted(rollout.rows, "row")
    return (
        f"Rollouts of {rows} per rank: {found.verdict(device)}. {limiting.name.capitalize()} limits, with "
        f"the highest peak: {takes}."
    )


def _sizes(rollout: RolloutPrediction) -> Iterator[str]:
    """What a search picks, or why it finds nothing; and how it generates, if not as usual."""
    if rollout.overrides:
        yield f"A search picks {rollout.overrides}"
    elif none := [phase.name for phase in rollout.phases if phase.picked is None]:
        yield f"A search finds nothing that fits in {' and '.join(none)}."
    if any(phase.sharded for phase in rollout.phases):
        yield (
            "The whole policy does not fit on one device, so it generates with sharded weights, which "
            "gathers them for each token."
        )


def _cautions(plan: PlanRequest, rollout: RolloutPrediction) -> list[str]:
    peaks = [
        (phase.name, peak)
        for phase in rollout.phases
        for peak in (phase.configured, phase.picked)
        if peak
    ]
    return cautions(plan.device, peaks, "in")


def _phases(plan: PlanRequest, rollout: RolloutPrediction) -> Table:
    header = ("phase", "micro-batch", "peak", "", "largest", "a search picks", "its peak")
    rows = [
        (
            phase.name,
            str(phase.configured.rows),
            human_bytes(phase.configured.reserved),
            phase.configured.verdict(plan.device),
            str(phase.largest or "none"),
            str(phase.picked.rows if phase.picked else "none"),
            human_bytes(phase.picked.reserved) if phase.picked else "",
        )
        for phase in rollout.phases
    ]
    return Table("", header, rows, right={1, 2, 4, 5, 6})


def _memory(rollout: RolloutPrediction) -> Table:
    """The parts of each phase's peak, at the configured sizes."""
    phases = rollout.phases
    limiting = rollout.limiting.configured
    peaks = [phase.configured for phase in phases]
    rows = memory_rows(peaks, limiting, _SMALL * limiting.live)
    header = ("peak memory", *(f"{p.name}, {counted(p.configured.rows, 'row')}" for p in phases))
    return Table("", header, rows, right=range(1, len(header)))


def memory_rows(
    peaks: Sequence[Peak], first: Peak, least: float = 1 << 20
) -> list[tuple[str, ...]]:
    """The parts of some peaks that are not too small, the largest of the ``first`` first, and their sums."""
    parts = sorted({part for peak in peaks for part in peak.parts})
    parts.sort(key=lambda part: -first.parts.get(part, 0))
    rows = [
        (part, *(human_bytes(peak.parts.get(part, 0)) for peak in peaks))
        for part in parts
        if any(peak.parts.get(part, 0) >= least for peak in peaks)
    ]
    rows.append(("in tensors", *(human_bytes(peak.allocated) for peak in peaks)))
    if any(peak.reserved != peak.allocated for peak in peaks):
        rows.append(("held by the allocator", *(human_bytes(peak.reserved) for peak in peaks)))
    return rows


def _times(
    rollout: RolloutPrediction, speed: Speed, ranks: int, job: Job, fits: bool
) -> list[Block]:
    each = speed.tokens_per_second_per_gpu
    in_all = f", {each * ranks:,.0f} in all" if ranks > 1 else ""
    condition = "" if fits else ", if it fitted"
    lines = [
        f"Speed of rollouts{condition}: {each:,.0f} tokens/s per GPU ({band_text(speed)}){in_all}, prompts "
        f"and responses, MFU {speed.mfu:.0%}; a rollout takes {human_seconds(speed.seconds)}."
    ]
    if fits:
        lines += cost_lines(speed, ranks, job)
    if (picked := rollout.speed_picked) and picked.seconds != speed.seconds:
        lines.append(
            f"With what a search picks: {picked.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, "
            f"{human_seconds(picked.seconds)}."
        )
    rows = [
        (
            phase.name,
            human_seconds(phase.speed.seconds),
            f"{phase.speed.seconds / speed.seconds:.1%}",
            human_seconds(phase.speed_picked.seconds) if phase.speed_picked else "",
        )
        for phase in rollout.phases
        if phase.speed is not None
    ]
    header = ("time of a rollout", "now", "share", "as a search picks")
    return [Paragraph(lines, important=True), Table("", header, rows, right={1, 2, 3})]
