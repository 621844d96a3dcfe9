"""The report of the plan command: as blocks of text, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchtune_adaptive.cli.candidates_report import Fastest, fastest_as_dict, fastest_blocks
from torchtune_adaptive.cli.job import Job
from torchtune_adaptive.cli.margin import AS_WRITTEN, cautions, peak_of, worst
from torchtune_adaptive.cli.rollout_report import memory_rows, rollout_blocks
from torchtune_adaptive.cli.speed_report import (
    DeviceAnswer,
    compare_table,
    machine_as_dict,
    speed_as_dict,
    speed_blocks,
)
from torchtune_adaptive.common import Block, Listing, Paragraph, Table, human_bytes
from torchtune_adaptive.planner import DOES_NOT_FIT, Answer, Peak
from torchtune_adaptive.recipe import TOKENS, LengthLimits, PlanRequest, Prediction

_WHERE = {"forward": "forward pass", "backward": "backward pass", "optimizer step": "optimizer"}
_NOT_SCALED = (
    "Memory did not scale as expected for this config, so every size was traced separately (slower, equally "
    "reliable)."
)
_NO_JOB = Job()
_SAME = 0.01
"""Share of the peak that a what-if must save to gain something, where it gains no row."""


@dataclass(frozen=True)
class WhatIfResult:
    """The prediction for a what-if, or why there is none."""

    name: str
    answer: Prediction | None
    reason: str = ""
    override: str = ""
    """Override to type for it."""


@dataclass(frozen=True)
class PlanReport:
    """Everything the plan command reports."""

    plan: PlanRequest
    found: Prediction
    """Prediction for the config as it is, its largest size verified by a trace of its own."""
    first_answer: Prediction
    """Prediction before that, as the headline has it."""
    last_rank: Prediction | None
    """Prediction for the last rank, if its share of the parameters differs from that of the rank that the
    plan is for; for the first, if that is the last."""
    outcomes: Sequence[WhatIfResult]
    by_length: LengthLimits | None = None
    """Limits of rows of other lengths, if asked."""
    adapter_rank: int | None = None
    """Highest power of two for the adapters' rank that fits at the configured batch size, if asked."""
    job: Job = _NO_JOB
    compared: Sequence[Answer] = ()
    """Predictions for the same config on other devices."""
    fastest: Fastest | None = None
    """Candidates for the fastest configuration, if asked."""

    @property
    def verdict(self) -> str:
        """The verdict for the configured batch size, on the rank where it is worse."""
        answers = [self.found, *([self.last_rank] if self.last_rank else [])]
        return worst([one.verdict(self.plan.device) for one in answers])


def headline(plan: PlanRequest, found: Prediction, job: Job = _NO_JOB) -> list[Block]:
    """The prediction for the config as it is: the answer first, then memory and time in detail."""
    devices = f"{plan.ranks}{' x' * (plan.ranks > 1)} {plan.device.name}"
    about = f"{plan.name} on {devices}, rows of {found.length} tokens ({plan.length_source})"
    if found.rollout is not None:
        blocks = rollout_blocks(plan, found, about, job)
    else:
        answer = f"{_verdict_text(plan, found)} {_largest_text(found)}"
        blocks = [Paragraph([answer, *_cautions(plan, found), about], important=True)]
        blocks.append(_memory_table(found))
        if found.speed is not None:
            fits = found.verdict(plan.device) != DOES_NOT_FIT
            blocks += speed_blocks(found.speed, found.rows, found.ranks, job, fits)
    if found.traced_directly:
        blocks.append(Paragraph([_NOT_SCALED]))
    if found.as_written:
        blocks.append(Paragraph([AS_WRITTEN.format(found.as_written)], important=True))
    if plan.assumptions:
        blocks.append(Listing("Assumptions", plan.assumptions))
    return blocks


def _verdict_text(plan: PlanRequest, found: Prediction) -> str:
    peak = found.configured
    takes = f"peak {peak_of(plan.device, peak.reserved)}"
    return f"batch_size {found.rows}: {peak.verdict(plan.device)}, {takes}."


def _largest_text(found: Prediction) -> str:
    if not found.largest:
        return f"Not even one row of {found.length} tokens fits."
    text = f"Largest micro-batch that fits: {found.largest}"
    if found.picked is None or found.picked.rows == found.largest:
        return f"{text}."
    search = "a search"
    if found.picked.rows > found.largest:
        search += ", after which memory is in fewer pieces,"
    rounding = found.rounding.replace("_", " ")
    return f"{text}; {search} picks {found.picked.rows} ({rounding})."


def _cautions(plan: PlanRequest, found: Prediction) -> list[str]:
    """Lines about sizes of which only a trial can tell whether they fit."""
    peaks = sorted(_of_interest(found), key=lambda peak: peak.rows)
    return cautions(plan.device, [(str(peak.rows), peak) for peak in peaks], "at batch_size")


def _of_interest(found: Prediction) -> list[Peak]:
    """The peaks of the sizes that matter, each size once; what is reserved after a search only where a run
    without one has no such peak."""
    shown = [peak for peak in (found.configured, found.picked, found.at_largest) if peak]
    best = {peak.rows: peak for peak in (found.picked, found.at_largest, found.configured) if peak}
    return [best[rows] for rows in dict.fromkeys(peak.rows for peak in shown)]


def _memory_table(found: Prediction) -> Table:
    """The parts of the peak at the configured batch size and at those of interest."""
    peaks = _of_interest(found)
    rows = memory_rows(peaks, peaks[0])
    rows.append(("reached in", *(_WHERE.get(peak.phase, peak.phase) for peak in peaks)))
    header = ("peak memory", *(f"batch_size {peak.rows}" for peak in peaks))
    return Table("", header, rows, right=range(1, len(header)))


def details(report: PlanReport) -> list[Block]:
    """The blocks after the headline: corrections, the last rank, the limits, the what-ifs."""
    blocks: list[Block] = []
    if report.found.traced_directly and not report.first_answer.traced_directly:
        correction = f"{_verdict_text(report.plan, report.found)} {_largest_text(report.found)}"
        text = f"Correction, from a trace of every size. {correction}"
        blocks.append(Paragraph([text], important=True))
    if report.last_rank is not None:
        other = report.last_rank
        peak = other.configured
        text = (
            "Parameters do not divide evenly across ranks; the numbers above are for rank "
            f"{report.found.rank}. The peak of rank {other.rank} is {human_bytes(peak.reserved)} reserved "
            f"({human_bytes(peak.allocated)} allocated); its largest micro-batch is {other.largest}."
        )
        blocks.append(Paragraph([text]))
    if report.fastest is not None:
        blocks += fastest_blocks(report.fastest)
    if report.compared:
        compared = [DeviceAnswer.of(one) for one in report.compared]
        blocks.append(compare_table(compared, report.plan.ranks, report.job))
    if report.outcomes:
        blocks += [_limits_table(report), *_what_ifs(report)]
    elif report.verdict == DOES_NOT_FIT and not (report.fastest or report.found.rollout):
        blocks.append(Paragraph([_instead(report)]))
    return blocks


def _instead(report: PlanReport) -> str:
    """What to do about a config that does not fit, where no alternative was predicted."""
    if report.found.largest:
        fits = f"It fits with batch_size={report.found.largest}."
        return f"{fits} Run without --no-what-ifs to see what else fits."
    ways = [f"--seq-len {report.plan.length // 2}", f"--nproc {2 * report.plan.ranks}"]
    asked = report.plan.asked
    if not asked["enable_activation_checkpointing"]:
        ways.append("enable_activation_checkpointing=True")
    if not asked.kind.adapters:
        ways.append("a LoRA or QLoRA config")
    elif not asked.quantized_weights:
        ways.append("a QLoRA config")
    *others, last = ways
    return f"Run without --no-what-ifs to see what fits, or try {', '.join(others)}, or {last}."


def _limits_table(report: PlanReport) -> Table:
    found, at = report.found, f"at batch_size {report.found.rows}"
    rows = [("rows in a micro-batch", str(found.rows), str(found.largest or "none"))]
    lengths = report.by_length
    if lengths is not None and lengths.longest is not None:
        most = str(lengths.longest or "none")
        if lengths.bound is not None and lengths.longest + TOKENS > lengths.bound:
            most = f"{lengths.bound}, the most that the model takes"
        rows.append((f"tokens in a row, {at}", str(found.length), most))
    if report.adapter_rank is not None:
        now = str(report.plan.cfg.model.lora_rank)
        rows.append((f"adapter rank, {at}", now, str(report.adapter_rank or "none")))
    for length, largest in sorted(lengths.largest.items() if lengths else ()):
        rows.append((f"rows of {length} tokens", "", str(largest or "none")))
    return Table("What limits you", ("", "now", "at most"), rows, right={1})


def _what_ifs(report: PlanReport) -> list[Block]:
    """The alternatives, those that gain most first; those that gain nothing apart."""
    now = report.found
    predicted = [(one, one.answer) for one in report.outcomes if one.answer is not None]
    predicted.sort(key=lambda pair: (-pair[1].largest, pair[1].configured.reserved))
    blocks: list[Block] = []
    at = f"at batch_size {now.rows}"
    titles = {True: f"What if, {at}: gains, largest first", False: f"No gain, {at}"}
    for gains, title in titles.items():
        if chosen := [pair for pair in predicted if _gains(now, pair[1]) is gains]:
            blocks.append(_what_if_table(title, now, chosen))
    if failed := [f"{one.name}: {one.reason}" for one in report.outcomes if one.reason]:
        blocks.append(Listing("No prediction", failed))
    return blocks


def _gains(now: Prediction, other: Prediction) -> bool:
    if _is_faster(now, other) and _has_room(other):
        return True  # at whatever cost in memory
    if other.largest != now.largest:
        return other.largest > now.largest
    return other.configured.reserved < now.configured.reserved * (1 - _SAME)


def _is_faster(now: Prediction, other: Prediction) -> bool:
    if now.speed is None or other.speed is None or other.rows != now.rows:
        return False
    gain = other.speed.tokens_per_second_per_gpu / now.speed.tokens_per_second_per_gpu
    return other.ranks == now.ranks and gain > 1 + _SAME


def _has_room(found: Prediction) -> bool:
    """Whether the configured batch size fits."""
    return found.rows <= found.largest


def _what_if_table(
    title: str, now: Prediction, chosen: Sequence[tuple[WhatIfResult, Prediction]]
) -> Table:
    header = ["", "largest micro-batch", "peak changes by", "to"]
    if now.speed:
        header[1] = "largest"
        header.append("tokens/s per GPU")
    rows = []
    for one, answer in chosen:
        largest = f"{now.largest or 'none'} -> {answer.largest or 'none'}"
        peak = answer.configured.reserved
        row = [one.name, largest, _change(now.configured, answer.configured), human_bytes(peak)]
        rows.append([*row, _speed_cell(answer)] if now.speed else row)
    return Table(title, header, rows, range(1, len(header)), [one.override for one, _ in chosen])


def _speed_cell(found: Prediction) -> str:
    if not _has_room(found):
        return "does not fit"
    return f"{found.speed.tokens_per_second_per_gpu:,.0f}" if found.speed else "unknown"


def _change(now: Peak, other: Peak) -> str:
    """``-3.1 GiB``."""
    difference = other.reserved - now.reserved
    return f"{'-' if difference < 0 else '+'}{human_bytes(abs(difference))}"


def as_dict(report: PlanReport) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "verdict": report.verdict,
        "config": report.plan.name,
        "device": asdict(report.plan.device),
        "assumptions": list(report.plan.assumptions),
        "machine": machine_as_dict(report.plan),
        "row_length_source": report.plan.length_source,
        **asdict(report.found),
        **speed_as_dict(
            report.found.speed, report.plan.ranks, report.job, fits=report.verdict != DOES_NOT_FIT
        ),
        "limiting_phase": report.found.rollout.limiting.name if report.found.rollout else None,
        "last_rank": asdict(report.last_rank) if report.last_rank else None,
        "lengths": report.by_length.largest if report.by_length else {},
        "longest_length": report.by_length.longest if report.by_length else None,
        "largest_adapter_rank": report.adapter_rank,
        "compared": [asdict(one) for one in report.compared],
        "fastest": fastest_as_dict(report.fastest) if report.fastest else None,
        "what_ifs": [asdict(outcome) for outcome in report.outcomes],
    }
