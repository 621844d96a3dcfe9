"""The report of ``plan --fastest``: the choice, what it changes, and the other candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchtune_adaptive.cli.margin import caution, peak_of
from torchtune_adaptive.common import Block, Listing, Paragraph, Table, human_bytes
from torchtune_adaptive.planner import Speed
from torchtune_adaptive.recipe import Candidate, PlanRequest, chosen, overrides, too_close_to_call

_MOST_LISTED, _MOST_CLOSE = 12, 3


@dataclass(frozen=True)
class Fastest:
    """The candidates, from the fastest."""

    plan: PlanRequest
    candidates: Sequence[Candidate]
    may_change: str | tuple[str, ...]

    @property
    def choice(self) -> Candidate | None:
        return chosen(self.candidates)

    @property
    def is_uncertain(self) -> bool:
        """Whether the choice is so near the usable memory that the prediction's error decides."""
        return self.choice is not None and self.verdict(self.choice) == "UNCERTAIN"

    @property
    def choice_with_margin(self) -> Candidate | None:
        """The choice among the candidates that fit in spite of the prediction's error."""
        return chosen(one for one in self.candidates if self.verdict(one) == "FITS")

    def verdict(self, one: Candidate) -> str | None:
        """The verdict on a candidate's peak, if it was traced."""
        return None if one.reserved is None else self.plan.device.verdict(one.reserved)

    @property
    def own(self) -> Candidate:
        return next(one for one in self.candidates if not one.changes)

    @property
    def close(self) -> list[Candidate]:
        return too_close_to_call(self.candidates)

    def overrides(self, one: Candidate) -> list[str]:
        """The overrides that turn the config into a candidate."""
        return overrides(self.plan.query().asked.cfg, one.asked.cfg)


def fastest_blocks(fastest: Fastest) -> list[Block]:
    """The choice first, then the candidates."""
    lines = [_answer(fastest)]
    if fastest.is_uncertain:
        lines.append(caution(fastest.plan.device, "with this choice"))
    blocks: list[Block] = [Paragraph([*lines, *_close_lines(fastest)], important=True)]
    choice = fastest.choice
    if choice is not None and choice.changes:
        blocks.append(Listing("Changes", [str(change) for change in choice.changes]))
        blocks.append(Listing("To use it, add", fastest.overrides(choice)))
    if choice is not None and choice.remark:
        blocks.append(Paragraph([f"{choice.remark}."]))
    if fastest.is_uncertain:
        blocks += _with_margin(fastest)
    blocks.append(_table(fastest))
    return blocks


def _with_margin(fastest: Fastest) -> list[Block]:
    """The choice for whoever wants no uncertainty."""
    safe = fastest.choice_with_margin
    if safe is None:
        return [Paragraph(["No candidate was found to fit with that margin."], important=True)]
    as_it_is = f"the config as it is, peak {_peak(fastest, safe)}"
    what = _gain(fastest, safe) if safe.changes else as_it_is
    blocks: list[Block] = [
        Paragraph([f"Fastest that fits with that margin: {what}."], important=True)
    ]
    if safe.changes:
        blocks.append(Listing("To use that one, add", fastest.overrides(safe)))
    return blocks


def _answer(fastest: Fastest) -> str:
    choice = fastest.choice
    if choice is None:
        return (
            f"No candidate was found to fit into {human_bytes(fastest.plan.device.usable_bytes)}."
        )
    if not choice.changes:
        return "The config is the fastest candidate that fits as it is."
    return f"Fastest that fits: {_gain(fastest, choice)}."


def _gain(fastest: Fastest, one: Candidate) -> str:
    """How fast a candidate is, and its peak."""
    own = fastest.own
    gain = one.tokens_per_second_per_gpu / own.tokens_per_second_per_gpu - 1
    than = f"{gain:+.0%} over the config as it is" + ("" if own.fits else ", which does not fit")
    speed = f"{one.tokens_per_second_per_gpu:,.0f} tokens/s per GPU at batch_size {one.asked['batch_size']}"
    return f"{speed} ({than}), peak {_peak(fastest, one)}"


def _peak(fastest: Fastest, one: Candidate) -> str:
    return peak_of(fastest.plan.device, one.reserved or 0)


def _close_lines(fastest: Fastest) -> list[str]:
    """What is too close to the choice to call one of the two faster."""
    choice, close = fastest.choice, fastest.close
    if choice is None or not close:
        return []
    named = "; ".join(
        f"{_name(one)} ({choice.seconds / one.seconds - 1:+.1%})" for one in close[:_MOST_CLOSE]
    )
    more = f"; {len(close) - _MOST_CLOSE} more" if len(close) > _MOST_CLOSE else ""
    return [
        f"Too close to call, as predictions with other micro-batches differ by up to {Speed.CLOSE:.0%}: "
        f"{named}{more}. Time them to know."
    ]


def _table(fastest: Fastest) -> Table:
    """The fastest candidates, and of the others those that were traced."""
    candidates = fastest.candidates
    traced = [one for one in candidates[_MOST_LISTED:] if one.reserved is not None]
    shown = [*candidates[:_MOST_LISTED], *traced]
    rows = [(_name(one), f"{one.tokens_per_second_per_gpu:,.0f}", _memory(one)) for one in shown]
    left = len(candidates) - len(rows)
    title = "Candidates by predicted speed" + (f" ({left} more not listed)" if left else "")
    return Table(title, ("changes", "tokens/s per GPU", "peak"), rows, {1, 2})


def _name(one: Candidate) -> str:
    """The changes in few words: the last part of each key, and the new value."""
    if not one.changes:
        return f"the config as it is (batch_size {one.asked['batch_size']})"
    return ", ".join(f"{_short(change.key)}={_value(change.new)}" for change in one.changes)


def _short(key: str) -> str:
    *_, block, name = ("", *key.split("."))
    name = block if name == "_component_" else name
    return {
        "fsdp_reshard_after_forward": "reshard",
        "enable_activation_offloading": "offload",
        "custom_sharded_layers": "sharded",
    }.get(name, name)


def _value(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "+".join(map(str, value))
    return str(value).rpartition(".")[2] if isinstance(value, str) else str(value)


def _memory(one: Candidate) -> str:
    if one.reserved is None:
        return "not traced"
    return f"{human_bytes(one.reserved)}{'' if one.fits else ', does not fit'}"


def fastest_as_dict(fastest: Fastest) -> dict[str, Any]:
    """Everything, for JSON; configs as the overrides that make them."""
    choice, safe = fastest.choice, fastest.choice_with_margin
    return {
        "may_change": fastest.may_change,
        "overrides": fastest.overrides(choice) if choice else [],
        "choice": _as_dict(fastest, choice) if choice else None,
        "choice_with_margin": _as_dict(fastest, safe) if safe else None,
        "too_close_to_call": [_as_dict(fastest, one) for one in fastest.close],
        "candidates": [_as_dict(fastest, one) for one in fastest.candidates],
    }


def _as_dict(fastest: Fastest, one: Candidate) -> dict[str, Any]:
    return {
        "changes": [asdict(change) for change in one.changes],
        "overrides": fastest.overrides(one),
        "seconds": one.seconds,
        "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu,
        "reserved": one.reserved,
        "fits": one.fits,
        "verdict": fastest.verdict(one),
    }
