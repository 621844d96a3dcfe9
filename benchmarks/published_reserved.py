"""What published runs had reserved, beside what was predicted: a part of the page of published peaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from published_page import MIB, is_eager, table
from published_rows import FMS

from torchtune_adaptive.planner.memory.gpus import COMMUNICATION, CONTEXT, GIB
from torchtune_adaptive.planner.memory.peak import FRAGMENTATION
from torchtune_adaptive.planner.memory.planned import ERROR_BAND

_RESERVED = """
## What was reserved

Verdicts are about what the allocator reserves, `Plan.peak`, give or take {band} %; on several GPUs and
with weights of 4 bits up to {more} % more. fitcheck says what torch had reserved. fms-acceleration says
what nvidia-smi showed, of which {context} GiB are taken off for the CUDA context, and on several GPUs
{nccl} GiB more for NCCL, as plans assume. Runs with fused kernels are left out, because plain ones are
planned.

**Of {alone} runs on one GPU with the attention that plans have, {inside} are within the band.** Of
the {exact} without 4 bits, the worst is off by {exact_worst} %. By the first predictions {inside_first}
were within it. Those replayed a step as it is after a search, where a small first step has created the
optimizer's state. In a trainer the first step is as large as the others, and the state lies where its
activations were. Full fine-tuning of PowerLM-3b, whose numbers had been read, showed it: {too_low} % too
low with 4 rows, and {too_high} % too high with 8. Nothing else was changed in the predictions.

- **Weights of 4 bits**: loading leaves memory behind that is not traced, and repeated runs differed by up
  to 20 MiB. The band for them was {band} % before these numbers were read, and {inside_before} of
  {quantized} runs were within it.
- **Eager attention**, which these runs had and no plan has: {eager_inside} of {eager} are within the
  band, and the worst is off by {eager_worst} %. Why is not known.
- **On two GPUs** FSDP1 ran, and FSDP2 is planned, which is predicted to reserve more.
"""


@dataclass(frozen=True)
class Reserved:
    """What a run had reserved, and what was predicted: at first, and since."""

    table: str
    gpus: int
    row: str
    published: float
    first: int
    predicted: int

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    def is_inside(self, predicted: int) -> bool:
        """Whether the band that a plan prints holds."""
        fragmented = self.gpus > 1 or "QLoRA" in self.row
        above = max(ERROR_BAND, FRAGMENTATION) if fragmented else ERROR_BAND
        return 1 - ERROR_BAND <= self.published / predicted <= 1 + above


def reserved(
    rows: Iterable[Mapping[str, Any]], published: Mapping[str, Mapping[str, float]]
) -> list[Reserved]:
    """The runs of which it is known what they had reserved, without those of fused kernels."""
    found = []
    for one in rows:
        known = published.get(one["table"], {}).get(one["row"])
        if known is None or "reserved" not in one or "foak" in one["row"]:
            continue
        gpus = 1
        if one["table"] == FMS:  # of which nvidia-smi shows all that a process has
            gpus = int(one["row"].rpartition(", ")[2].partition(" x ")[0])
            known -= (CONTEXT + (COMMUNICATION if gpus > 1 else 0)) / MIB
        numbers = one["reserved"], one.get("again_reserved", one["reserved"])
        found.append(Reserved(one["table"], gpus, one["row"], known * MIB, *numbers))
    return found


def section(rows: Iterable[Mapping[str, Any]], published: Mapping[str, Mapping[str, float]]) -> str:
    """The part of the page about what was reserved."""
    return "\n".join(_lines(reserved(rows, published))) + "\n"


def _lines(found: Sequence[Reserved]) -> Iterator[str]:
    of_one = [one for one in found if one.gpus == 1]
    alone = [one for one in of_one if not is_eager(one.row)]
    eager = [one for one in of_one if is_eager(one.row)]
    quantized = [one for one in alone if "QLoRA" in one.row]
    exact = [one for one in alone if one not in quantized]
    first = {one.row: one.first / one.published - 1 for one in alone}
    narrow = [one for one in quantized if abs(one.published / one.predicted - 1) <= ERROR_BAND]
    yield _RESERVED.rstrip("\n").format(
        band=f"{100 * ERROR_BAND:.0f}",
        more=f"{100 * FRAGMENTATION:.0f}",
        context=f"{CONTEXT / GIB:g}",
        nccl=f"{COMMUNICATION / GIB:g}",
        alone=len(alone),
        inside=_inside(alone),
        exact=len(exact),
        exact_worst=f"{100 * max(abs(one.error) for one in exact):.1f}",
        inside_first=sum(one.is_inside(one.first) for one in alone),
        too_low=f"{-100 * first['PowerLM-3b full, none, 1 x 4']:.0f}",
        too_high=f"{100 * first['PowerLM-3b full, none, 1 x 8']:.0f}",
        inside_before=len(narrow),
        quantized=len(quantized),
        eager=len(eager),
        eager_inside=_inside(eager),
        eager_worst=f"{100 * max(abs(one.error) for one in eager):.0f}",
    )
    yield ""
    columns = ("table", "GPUs", "runs", "median", "worst", "in the band", "at first")
    yield from table(columns, _summaries_of_reserved(found))
    yield ""
    yield from table(
        ("run", "reserved, MiB", "predicted, MiB", "error", "at first"),
        [
            (
                one.row,
                f"{one.published / MIB:,.0f}",
                f"{one.predicted / MIB:,.0f}",
                f"{100 * one.error:+.1f} %",
                f"{one.first / MIB:,.0f}",
            )
            for one in found
        ],
    )


def _inside(runs: Iterable[Reserved]) -> int:
    return sum(one.is_inside(one.predicted) for one in runs)


def _summaries_of_reserved(found: Sequence[Reserved]) -> Iterator[tuple[str, ...]]:
    for key in dict.fromkeys((one.table, one.gpus) for one in found):
        runs = [one for one in found if (one.table, one.gpus) == key]
        errors = [abs(one.error) for one in runs]
        inside = (
            sum(one.is_inside(getattr(one, which)) for one in runs)
            for which in ("predicted", "first")
        )
        shares = (f"{100 * share:.1f} %" for share in (median(errors), max(errors)))
        yield (key[0], str(key[1]), str(len(runs)), *shares, *map(str, inside))
