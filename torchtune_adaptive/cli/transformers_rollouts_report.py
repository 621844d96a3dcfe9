"""The answer for a step of TRL that generates its rows: each phase beside vLLM, and what to set."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from torchtune_adaptive.cli.margin import caution, caution_of_retries, peak_of
from torchtune_adaptive.common import Block, Listing, Paragraph, Table, human_bytes
from torchtune_adaptive.planner import DOES_NOT_FIT, DeviceLimits

if TYPE_CHECKING:
    from torchtune_adaptive.library import RolloutsPlan, TransformersRollouts

_UTILIZATION = "vllm_gpu_memory_utilization"


def verdict_of(plan: RolloutsPlan, device: DeviceLimits) -> str:
    """The worst verdict of a phase; nothing fits if vLLM has no room for its weights."""
    if _missing(plan):
        return DOES_NOT_FIT
    verdicts = _verdicts(plan, device)
    return next((one for one in (DOES_NOT_FIT, "UNCERTAIN") if one in verdicts), "FITS")


def rollouts_blocks(
    plan: RolloutsPlan,
    step: TransformersRollouts,
    device: DeviceLimits,
    verdict: str,
) -> list[Block]:
    """The answer, what each phase takes and what of."""
    limiting = next(phase for phase in plan.phases if phase.name == plan.limiting)
    limits = _limits(device, limiting.usable_bytes)
    largest = f"Largest that fits: {plan.largest}." if plan.largest else "Not even one row fits."
    devices = f"{step.ranks}{' x' * (step.ranks > 1)} {device.name}"
    beside = f", beside {human_bytes(limiting.beside)} of vLLM" if limiting.beside else ""
    lines = [
        f"per_device_train_batch_size {plan.rows}: {verdict}. {limiting.name.capitalize()} has the least "
        f"room: {peak_of(limits, limiting.peak)}{beside}. {largest}",
        f"{step.trainer} on {devices}, prompts of {step.max_prompt_length} and "
        f"completions of {step.max_completion_length} tokens",
        *_about_vllm(plan, step),
    ]
    if limiting.with_retries:
        lines.append(caution_of_retries(f"in {limiting.name}"))
    elif limits.verdict(limiting.peak) == "UNCERTAIN":
        lines.append(caution(limits, f"in {limiting.name}"))
    lines.append(_advice(plan, step))
    return [
        Paragraph(lines, important=True),
        _phases(plan, device),
        _memory(plan),
        Listing("What is planned", plan.assumptions),
    ]


def _about_vllm(plan: RolloutsPlan, step: TransformersRollouts) -> list[str]:
    """What vLLM's share may be, and whether it suffices for vLLM itself."""
    if plan.most_utilization is None:
        return []
    most, set_to = plan.most_utilization, step.vllm_gpu_memory_utilization
    lines = []
    if most < 0.01:
        lines.append(f"No {_UTILIZATION} leaves room for {plan.rows} rows.")
    elif most < set_to:
        lines.append(f"{_UTILIZATION}: {most:g} would leave room for {plan.rows} rows.")
    else:
        lines.append(f"{_UTILIZATION} may be up to {most:g} with {plan.rows} rows.")
    if (needs := plan.engine) is None:
        return lines
    share = next(phase.beside for phase in plan.phases if phase.name == "generation")
    weights = f"its weights take {human_bytes(needs.weights)}"
    if missing := _missing(plan):
        lines.append(
            f"WARNING: vLLM does not start with {human_bytes(share)}: {weights}, which leaves it "
            f"{human_bytes(missing)} short. Set a higher {_UTILIZATION}, or a larger "
            "vllm_tensor_parallel_size."
        )
    elif share < needs.least:
        lines.append(
            f"WARNING: vLLM does not start with {human_bytes(share)}: {weights}, and its cache for a "
            f"sequence of {needs.tokens} tokens {human_bytes(needs.cache or 0)}. Set a higher "
            f"{_UTILIZATION}, or vllm_max_model_length to {step.max_length} or more."
        )
    elif (sequences := needs.sequences(share, step.max_length)) is not None:
        asked = step.rows_generated * step.vllm_tensor_parallel_size
        room = f"at most {sequences} of the {asked}" if sequences < asked else f"all {asked}"
        lines.append(
            f"Of vLLM's {human_bytes(share)}, {weights}. Its cache has room for {room} sequences that it "
            "generates together."
        )
    return lines


def _missing(plan: RolloutsPlan) -> int:
    """Bytes that vLLM lacks for its weights."""
    if plan.engine is None:
        return 0
    share = next(phase.beside for phase in plan.phases if phase.name == "generation")
    return max(0, plan.engine.weights - share)


def _advice(plan: RolloutsPlan, step: TransformersRollouts) -> str:
    """What to write: the largest micro-batch that fits and keeps the rows of a step and of a generation, or
    what else takes less memory."""
    if not plan.largest:
        ways = ["a shorter max_completion_length"]
        if step.colocated and not step.vllm_enable_sleep_mode:
            ways.insert(0, "vllm_enable_sleep_mode: true")
        if step.has_reference and not step.lora:
            ways.insert(0, "beta: 0, which needs no reference")
        switched = ["gradient_checkpointing: true"] * (not step.gradient_checkpointing)
        switched = ["--method: lora"] * (not step.lora) + switched
        less = ", ".join(switched + ways)
        return f"What takes less: {less}; or more GPUs that share the weights (FSDP2)"
    of_step = plan.rows * step.gradient_accumulation_steps
    both = gcd(of_step, step.rows_generated)
    best = max(size for size in range(1, min(plan.largest, both) + 1) if both % size == 0)
    if best == plan.rows:
        return "Nothing has to change."
    words = f"per_device_train_batch_size: {best}, gradient_accumulation_steps: {of_step // best}"
    if step.steps_per_generation is not None:
        words += f", steps_per_generation: {step.rows_generated // best}"
    return (
        f"Write: {words} (a step keeps its {of_step} rows on each GPU, and a generation its "
        f"{step.rows_generated})"
    )


def _phases(plan: RolloutsPlan, device: DeviceLimits) -> Table:
    header = ("phase", "rows at once", "trainer", "vLLM", "in all", "", "largest")
    rows = [
        (
            phase.name,
            str(phase.rows or ""),
            human_bytes(phase.peak),
            human_bytes(phase.beside) if phase.beside else "",
            human_bytes(phase.peak + phase.beside),
            verdict,
            str(phase.largest or "none") if phase.rows else "",
        )
        for phase, verdict in zip(plan.phases, _verdicts(plan, device), strict=True)
    ]
    return Table("", header, rows, right={1, 2, 3, 4, 6})


def _memory(plan: RolloutsPlan) -> Table:
    """The parts of each phase's peak."""
    last = plan.phases[-1].parts
    names = sorted({part for phase in plan.phases for part in phase.parts})
    names.sort(key=lambda part: -last.get(part, 0))
    rows = [
        (part, *(human_bytes(phase.parts.get(part, 0)) for phase in plan.phases))
        for part in names
        if any(phase.parts.get(part, 0) >= 1 << 20 for phase in plan.phases)
    ]
    rows.append(("held by the allocator", *(human_bytes(phase.peak) for phase in plan.phases)))
    header = ("peak memory", *(phase.name for phase in plan.phases))
    return Table("", header, rows, right=range(1, len(header)))


def _verdicts(plan: RolloutsPlan, device: DeviceLimits) -> list[str]:
    """The verdict on each phase."""
    return [
        "UNCERTAIN"
        if phase.with_retries
        else _limits(device, phase.usable_bytes).verdict(phase.peak)
        for phase in plan.phases
    ]


def _limits(device: DeviceLimits, usable_bytes: int) -> DeviceLimits:
    """What vLLM leaves of the device."""
    return replace(device, usable_bytes=usable_bytes)
