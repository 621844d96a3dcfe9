"""The report of a plan about speed: tokens per second, where the time goes, hours and cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchtune_adaptive.common import Block, ConfigError, Paragraph, Table, counted, human_bytes
from torchtune_adaptive.planner import Speed
from torchtune_adaptive.recipe import OnDevice, PlanRequest

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SMALL = 0.005
"""Share of a step's time below which a part is not listed."""


@dataclass(frozen=True)
class Job:
    """The tokens to train on, and what a GPU costs."""

    tokens: float | None = None
    prices: tuple[float, ...] = ()
    """Prices of one GPU for an hour: one for all devices, or one for each that is compared."""

    def price(self, device: int = 0) -> float | None:
        return self.prices[min(device, len(self.prices) - 1)] if self.prices else None

    def cost(self, speed: Speed, ranks: int, device: int = 0) -> tuple[float | None, float | None]:
        """Hours, and what they cost; None for what is not asked or not known."""
        if self.tokens is None:
            return None, None
        hours = speed.hours(self.tokens, ranks)
        price = self.price(device)
        return hours, price * hours * ranks if price is not None else None


def job(tokens: str | None, price: str | None) -> Job:
    """The job that ``--tokens 52M --price 2.5`` gives.

    Raises:
        ConfigError: it cannot be read.
    """
    number = None
    if tokens is not None:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", tokens.upper().replace(",", ""))
        if not found:
            raise ConfigError("--tokens", tokens, "is not a number of tokens", "Write 52M or 1.5B")
        number = float(found[1]) * _UNITS[found[2]]
    try:
        prices = tuple(float(one.strip("$")) for one in price.split(",")) if price else ()
    except ValueError:
        remedy = "Write the price of one GPU for an hour, e.g. 2.5"
        raise ConfigError("--price", price, "is not a price", remedy) from None
    return Job(number, prices)


def speed_blocks(speed: Speed, rows: int, ranks: int, job: Job, fits: bool = True) -> list[Block]:
    """The speed of a config, and where the time goes; what does not fit takes no hours and has no cost."""
    each = speed.tokens_per_second_per_gpu
    in_all = f", {each * ranks:,.0f} in all" if ranks > 1 else ""
    condition = "" if fits else ", if it fitted"
    lines = [
        f"Speed at batch_size {rows}{condition}: {each:,.0f} tokens/s per GPU ({band_text(speed)}){in_all}, "
        f"MFU {speed.mfu:.0%}; a step takes {human_seconds(speed.seconds)}.",
    ]
    if fits:
        lines += cost_lines(speed, ranks, job)
    elif job.tokens is not None:
        lines.append(f"No hours and no cost, because batch_size {rows} does not fit.")
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
    hours, cost = job.cost(speed, ranks)
    if hours is None:
        return []
    low, high = (1 / (1 + share) for share in reversed(speed.band))
    text = f"{human_tokens(job.tokens or 0)} tokens take {hours:.3g} hours"
    if ranks > 1:
        text += f", {hours * ranks:.3g} GPU hours"
    if cost is not None:
        text += f", and cost {cost:,.2f} (at {job.price():.2f} for a GPU hour)"
    return [
        f"{text}; {low:.2f} to {high:.2f} times as much, as the speed may be off. Padding counts."
    ]


def compare_table(devices: Sequence[OnDevice], ranks: int, job: Job) -> Table:
    """The config on several devices; speed, hours and cost only where it fits."""
    (rows,) = {one.peak.rows for one in devices}
    header = ["device", "verdict", "peak", "largest", f"tokens/s at {counted(rows, 'row')}", "MFU"]
    if job.tokens is not None:
        header += ["hours", *(["cost"] if job.prices else [])]
    lines = []
    for number, one in enumerate(devices):
        peak, largest = human_bytes(one.peak.reserved), str(one.largest or "none")
        row = [one.device.name, one.verdict, peak, largest]
        if not one.fits or one.speed is None:
            row += ["unknown" if one.fits else "", *[""] * (len(header) - 5)]
        else:
            band = f"{one.speed.tokens_per_second_per_gpu:,.0f} ({band_text(one.speed)})"
            costs = (each for each in job.cost(one.speed, ranks, number) if each is not None)
            row += [band, f"{one.speed.mfu:.0%}", *(f"{each:,.3g}" for each in costs)]
        lines.append(row)
    title = "On other devices" + (f", {ranks} each" if ranks > 1 else "") + " (tokens/s per GPU)"
    return Table(title, header, lines, set(range(2, len(header))))


def speed_as_dict(speed: Speed | None, ranks: int, job: Job, fits: bool = True) -> dict[str, Any]:
    """Speed, hours and cost for JSON's top level; no hours and no cost for what does not fit."""
    if speed is None:
        return {"tokens_per_second_per_gpu": None}
    hours, cost = job.cost(speed, ranks) if fits else (None, None)
    return {
        "tokens_per_second_per_gpu": speed.tokens_per_second_per_gpu,
        "mfu": speed.mfu,
        "hours": hours,
        "cost": cost,
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
    unit = next(u for u in reversed(_UNITS) if tokens >= _UNITS[u] or not u)
    return f"{tokens / _UNITS[unit]:.4g}{unit}"
