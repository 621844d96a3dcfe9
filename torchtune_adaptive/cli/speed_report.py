"""The report of a plan about speed: tokens per second, where the time goes, hours and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.cli.job import TOKENS_IN, Job
from torchtune_adaptive.common import Block, Paragraph, Table, counted, human_bytes
from torchtune_adaptive.planner import DOES_NOT_FIT, Answer, DeviceLimits, Speed

if TYPE_CHECKING:
    from torchtune_adaptive.recipe import PlanRequest

_SMALL = 0.005
"""Share of a step's time below which a part is not listed."""


@dataclass(frozen=True)
class DeviceAnswer:
    """The answer for one device of several."""

    device: DeviceLimits
    verdict: str
    rows: int
    peak: int
    largest: int
    speed: Speed | None

    @classmethod
    def of(cls, answer: Answer) -> DeviceAnswer:
        """An answer of the planner."""
        peak = answer.peak
        found = answer.verdict, peak.rows, peak.reserved, answer.largest
        return cls(answer.device, *found, answer.speed)


def speed_blocks(
    speed: Speed, rows: int, ranks: int, job: Job, fits: bool = True, where: str = "batch_size"
) -> list[Block]:
    """The speed of a config, and where the time goes; what does not fit takes no hours and has no cost.
    ``where`` names the key of the micro-batch."""
    each = speed.tokens_per_second_per_gpu
    in_all = f", {each * ranks:,.0f} in all" if ranks > 1 else ""
    condition = "" if fits else ", if it fitted"
    lines = [
        f"Speed at {where} {rows}{condition}: {each:,.0f} {job.unit}/s per GPU ({band_text(speed)}){in_all}, "
        f"MFU {speed.mfu:.0%}; a step takes {human_seconds(speed.seconds)}."
    ]
    if speed.attention_decides:
        lines.append(
            "Attention takes much of it, and is predicted as fast as FlashAttention-2. With older kernels, "
            "the speed is nearer to the lower end."
        )
    if fits:
        lines += cost_lines(speed, ranks, job)
    elif job.tokens is not None:
        lines.append(f"No hours and no cost, because {where} {rows} does not fit.")
    shares = sorted(speed.named_parts().items(), key=lambda part: -part[1])
    shares.append(("of this, computed again", speed.recomputing))
    parts = [
        (name, f"{share:.1%}", human_seconds(share * speed.seconds))
        for name, share in shares
        if share >= _SMALL
    ]
    times = Table("", ("time of a step", "share", ""), parts, right={1, 2})
    return [Paragraph(lines, important=True), times]


def band_text(speed: Speed) -> str:
    """``-30% to +5%``."""
    low, high = speed.band
    return f"{low:+.0%} to {high:+.0%}"


def cost_lines(speed: Speed, ranks: int, job: Job) -> list[str]:
    """Hours and cost of a job, if there is one."""
    hours, cost = job.hours(speed, ranks), job.cost(speed, ranks, job.price)
    if hours is None:
        return []
    low, high = (1 / (1 + share) for share in reversed(speed.band))
    text = f"{human_tokens(job.tokens or 0)} {job.unit} take {hours:.3g} hours"
    if ranks > 1:
        text += f", {hours * ranks:.3g} GPU hours"
    if cost is not None:
        text += f", and cost {cost:,.2f} (at {job.price:.2f} for a GPU hour)"
    return [
        f"{text}; {low:.2f} to {high:.2f} times as much, as the speed may be off. Padding counts."
    ]


def compare_table(devices: Sequence[DeviceAnswer], ranks: int, job: Job) -> Table:
    """The config on several devices; speed, hours and cost only where it fits."""
    (rows,) = {one.rows for one in devices}
    header = [
        "device",
        "verdict",
        "peak",
        "largest",
        f"{job.unit}/s at {counted(rows, 'row')}",
        "MFU",
    ]
    if job.tokens is not None:
        header += ["hours", *(["cost"] if job.compared else [])]
    lines = []
    for one, price in zip_longest(devices, job.compared):
        fits = one.verdict != DOES_NOT_FIT
        peak, largest = human_bytes(one.peak), str(one.largest or "none")
        row = [one.device.name, one.verdict, peak, largest]
        if not fits or one.speed is None:
            row += ["unknown" if fits else "", *[""] * (len(header) - 5)]
        else:
            band = f"{one.speed.tokens_per_second_per_gpu:,.0f} ({band_text(one.speed)})"
            costs = job.hours(one.speed, ranks), job.cost(one.speed, ranks, price)
            known = (f"{each:,.3g}" for each in costs if each is not None)
            row += [band, f"{one.speed.mfu:.0%}", *known]
        lines.append(row)
    title = (
        "On other devices" + (f", {ranks} each" if ranks > 1 else "") + f" ({job.unit}/s per GPU)"
    )
    return Table(title, header, lines, set(range(2, len(header))))


def speed_as_dict(speed: Speed | None, ranks: int, job: Job, fits: bool = True) -> dict[str, Any]:
    """Speed, hours and cost for JSON's top level; no hours and no cost for what does not fit."""
    if speed is None:
        return {"tokens_per_second_per_gpu": None}
    return {
        "tokens_per_second_per_gpu": speed.tokens_per_second_per_gpu,
        "mfu": speed.mfu,
        "hours": job.hours(speed, ranks) if fits else None,
        "cost": job.cost(speed, ranks, job.price) if fits else None,
    }


def machine_as_dict(plan: PlanRequest) -> dict[str, Any] | None:
    """The machine that speeds are predicted for, as told and as assumed; None without speeds."""
    if plan.pace is None:
        return None
    speeds = plan.pace.speeds
    return {
        "gpu": speeds.name,
        "gpus_in_a_node": speeds.gpus_in_a_node,
        "power_watts": speeds.power,
        "links_bytes_per_second": speeds.links,
        "network_bytes_per_second_per_gpu": speeds.network,
        "host_bytes_per_second": speeds.host,
        "told": {key: value for key, value in asdict(plan.machine).items() if value is not None},
    }


def human_seconds(seconds: float) -> str:
    """``5.31 s``, ``12.3 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def human_tokens(tokens: float) -> str:
    """``52M``."""
    unit = next(u for u in reversed(TOKENS_IN) if tokens >= TOKENS_IN[u] or not u)
    return f"{tokens / TOKENS_IN[unit]:.4g}{unit}"
