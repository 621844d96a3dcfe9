"""Limits of single quantities of a config: how far each can go before memory runs out.

Call these functions in a process that does nothing else: see ``workers``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchtune_adaptive.common import largest
from torchtune_adaptive.planner import TracedRun, peak
from torchtune_adaptive.recipe.plan.predict import Prediction, predict
from torchtune_adaptive.recipe.plan.query import Query
from torchtune_adaptive.recipe.tracing.traces import Traces

TOKENS = 64
"""Tokens between the row lengths that are tried."""
_MOST_TOKENS = 1 << 20
"""Longest rows for models that do not bound them."""


@dataclass(frozen=True)
class LengthLimits:
    """Limits of rows of other lengths."""

    largest: dict[int, int]
    """Largest micro-batch by row length."""
    longest: int | None
    """Longest rows that fit at the configured batch size; None if each length would have to be traced."""
    bound: int | None
    """Longest rows that the model takes, if it bounds them."""


def length_limits(
    query: Query, lengths: Iterable[int], traces: Traces | None = None
) -> LengthLimits:
    """The limits, with the largest micro-batch for those of the ``lengths`` that the model takes."""
    device, traces = query.device, traces or query.traces()
    run = query.run(traces, any_length=True)
    most = traces.max_seq_len or _MOST_TOKENS
    by_length = {n: run.largest(n, device) for n in lengths if 2 <= n <= most}

    def fits(steps: int) -> bool:
        if steps * TOKENS > most:
            return False
        return run.peak(query.rows, steps * TOKENS, device).reserved <= device.usable_bytes

    longest = None
    if run.any_length:
        longest = largest(fits, query.length // TOKENS) * TOKENS
        # With this one, three lengths are known with each number of rows, from which others follow.
        traces.step(TracedRun.ROWS[1], query.length // 4)
    traces.remember()
    return LengthLimits(by_length, longest, traces.max_seq_len)


def confirm(query: Query, lengths: Iterable[int]) -> tuple[Prediction, LengthLimits | None]:
    """The prediction once more, its largest size verified by a trace of that very size; and how rows of other
    lengths fit, if any are asked for."""
    traces = query.traces()
    prediction = predict(replace(query, confirmed=True), traces)
    return prediction, length_limits(query, lengths, traces) if lengths else None


_HIGHEST_POWER = 13
"""Bits of rank 4096, which is as large as the matrices of most models."""


def largest_adapter_rank(query: Query) -> int:
    """The highest power of two for ``lora_rank`` that fits at the configured batch size; each is traced."""
    asked = query.asked

    def fits(power: int) -> bool:
        if power > _HIGHEST_POWER:
            return False
        changed = asked.cfg.copy()
        changed.model.lora_rank = 1 << power - 1
        traces = replace(query, asked=replace(asked, cfg=changed)).traces()
        start_up, step = traces.start_up(query.length), traces.step(query.rows, query.length)
        traces.remember()
        if not asked.settings.tries_sizes:
            start_up = start_up.without_search(step)
        found = peak(start_up, step, query.rows, query.length, query.device)
        return found.reserved <= query.device.usable_bytes

    power = largest(fits, asked.cfg.model.lora_rank.bit_length())
    return 1 << power - 1 if power else 0
