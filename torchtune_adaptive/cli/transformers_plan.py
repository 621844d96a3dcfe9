"""``plan --hf MODEL``: the step of transformers' Trainer or of TRL's, in their words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from torchtune_adaptive.cli.hub import require_config
from torchtune_adaptive.cli.job import Job, job
from torchtune_adaptive.cli.margin import caution, caution_of_retries, estimate_line, peak_of
from torchtune_adaptive.cli.page_choices import names_in, require_file
from torchtune_adaptive.cli.plan_progress import with_progress
from torchtune_adaptive.cli.speed_report import (
    DeviceAnswer,
    compare_table,
    speed_as_dict,
    speed_blocks,
)
from torchtune_adaptive.cli.transformers_page import ROWS, write_step_page
from torchtune_adaptive.cli.transformers_rollouts_report import rollouts_blocks, verdict_of
from torchtune_adaptive.common import (
    Block,
    ConfigError,
    Listing,
    Paragraph,
    Table,
    human_bytes,
)
from torchtune_adaptive.planner import DOES_NOT_FIT, DeviceLimits, Machine, gpus, planned_gpu

if TYPE_CHECKING:
    from torchtune_adaptive.library import Plan, TransformersStep

METHODS = ("full", "lora", "qlora")
GENERATING = ("GRPOTrainer", "RLOOTrainer")
"""TRL's trainers that generate the rows they train on."""
TRAINERS = ("SFTTrainer", "DPOTrainer", "Trainer", *GENERATING)
_HEADROOM = 0.05
_NOT_SETTINGS = ("folder", "load_in_4bit", "lora", "ranks", "trainer")
"""Fields of a step that options give."""
_UNUSED = ("fastest", "may_change")
"""Options to which these steps have no answer."""
_OF_STEPS = ("compare", "tokens", "price", "html", "power", "links", "network")
"""Options about steps alone: about their speed, and the page."""


def plan_transformers(
    arguments: argparse.Namespace,
    ranks: int,
    gpu: str | None,
    memory: int | None,
    machine: Machine,
) -> str:
    """Print a prediction, of the step that options describe; returns its verdict.

    Raises:
        ConfigError: an option or a setting cannot work.
        NoPrediction: transformers is not installed, or the step cannot be traced.
    """
    require_config(arguments.hf.folder)
    kind = gpus.gpu(gpu or gpus.DEFAULT)
    device, assumptions = planned_gpu(kind, ranks, _HEADROOM, memory)

    step = _step(arguments, ranks)
    device = step.limits(device)
    names = names_in(arguments.compare)
    others = [gpus.gpu(name, "--compare") for name in names]
    asked_job = job(arguments.tokens, arguments.price, kind.name, names)
    if arguments.html:
        require_file(arguments.html)
    # Not by the capacity: vLLM takes its share of the whole card.
    question = {"gpu": kind.name, "memory": memory, "headroom": _HEADROOM, "machine": machine}
    plan = _plan(step, question, _estimate(step, device))
    is_named = gpu is not None or memory is None
    if not is_named:  # how fast a GPU is does not follow from its memory
        plan = replace(plan, speed=None)
    hints = ["padded=True or False says whether rows are padded"] * (not step.in_one_row)
    if step.dtype == "float32":
        hints.append("dtype=bfloat16 is for a model that is loaded in that type")
    told = (*arguments.hf.about, *hints)
    told += plan.assumptions if plan.speed else assumptions
    if is_named and plan.speed is None and step.trainer not in GENERATING:
        told += (f"no speed: that of a {kind.name} is not known in the type that is computed in",)
    told += (plan.unchecked,) * bool(plan.unchecked)
    plan = replace(plan, assumptions=(*step.about(), *told))
    verdict, blocks = _answered(plan, step, device, asked_job)
    compared = [
        _on(one, step, machine if one == kind else machine.for_other_gpus) for one in others
    ]
    if compared:
        blocks.append(compare_table(compared, ranks, asked_job))
    if arguments.json:
        about = {"verdict": verdict, "device": asdict(device), "step": asdict(step)}
        fits = verdict != DOES_NOT_FIT
        about |= speed_as_dict(plan.speed, ranks, asked_job, fits)
        others_found = [asdict(one) for one in compared]
        print(json.dumps({**about, **asdict(plan), "compared": others_found}, indent=1))
    else:
        print(arguments.render(blocks), end="")
    if arguments.html:
        write_step_page(arguments, step, plan, device, {**question, "timed": is_named})
    return verdict


def _plan(step: TransformersStep, question: dict[str, Any], estimate: str = "") -> Plan:
    """The plan of a step; remembered, or traced while the user sees the estimate."""
    plan = step.remembered(**question)
    return plan or with_progress(lambda: step.plan(**question), estimate)


def _on(kind: gpus.Gpu, step: TransformersStep, machine: Machine) -> DeviceAnswer:
    """The answer for another GPU."""
    plan = _plan(step, {"gpu": kind.name, "headroom": _HEADROOM, "machine": machine})
    device, _ = planned_gpu(kind, step.ranks, _HEADROOM)
    found = plan.rows, plan.peak, plan.largest
    device = step.limits(device)
    return DeviceAnswer(device, _verdict(plan, device), *found, plan.speed)


def _estimate(step: TransformersStep, device: DeviceLimits) -> str:
    """The line that is shown while the step is traced, if there is one."""
    about = None if device.before_ampere else step.estimated()  # attention may take more there
    if about is None:
        return ""
    where = f"{ROWS} {step.per_device_train_batch_size}"
    return estimate_line(device, about, step.ESTIMATE_ERROR, where)


def _verdict(plan: Plan, device: DeviceLimits) -> str:
    return "UNCERTAIN" if plan.with_retries else device.verdict(plan.peak)


def _answered(
    plan: Plan,
    step: TransformersStep,
    device: DeviceLimits,
    asked_job: Job,
) -> tuple[str, list[Block]]:
    """The verdict and the answer."""
    from torchtune_adaptive.library import RolloutsPlan, TransformersRollouts

    if isinstance(plan, RolloutsPlan) and isinstance(step, TransformersRollouts):
        verdict = verdict_of(plan, device)
        return verdict, rollouts_blocks(plan, step, device, verdict)
    verdict = _verdict(plan, device)
    return verdict, _blocks(plan, step, device, verdict, asked_job)


def refuse_unused_options(arguments: argparse.Namespace) -> None:
    """Refuse the options of ``plan`` to which these steps have no answer.

    Raises:
        ConfigError: one is given.
    """
    for name in (*_UNUSED, *(_OF_STEPS if arguments.trainer in GENERATING else ())):
        if value := getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            remedy = "Leave it out, or plan one of torchtune's configs"
            shown = str(value) if isinstance(value, Path) else value
            raise ConfigError(option, shown, "is not for this step", remedy)


def _kind(trainer: str) -> type[TransformersStep]:
    """The class of the steps of a trainer."""
    from torchtune_adaptive.library import TransformersRollouts, TransformersStep

    return TransformersRollouts if trainer in GENERATING else TransformersStep


def _step(arguments: argparse.Namespace, ranks: int) -> TransformersStep:
    kind = _kind(arguments.trainer)
    known = [one.name for one in fields(kind) if one.init and one.name not in _NOT_SETTINGS]
    settings = {"trainer": arguments.trainer, **_settings(arguments.words, known)}
    if arguments.seq_len:
        length = "max_prompt_length" if arguments.trainer in GENERATING else "max_length"
        settings[length] = arguments.seq_len
    method = arguments.method or METHODS[0]
    if arguments.trainer == "Trainer":  # whose defaults differ
        # What prepares a quantized model switches checkpointing on.
        prepared = method == "qlora" or settings.get("load_in_8bit") is True
        settings = {"bf16": False, "gradient_checkpointing": prepared, **settings}
    if arguments.trainer == "RLOOTrainer":
        settings = {"num_generations": 2, "beta": 0.05, **settings}
    return kind(
        folder=str(arguments.hf.folder),
        ranks=ranks,
        lora=method != "full",
        load_in_4bit=method == "qlora",
        **settings,
    )


def _settings(words: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    """The settings that ``key=value`` gives; the names of a list are separated by commas."""
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            reason = "is not a setting of this step" if equals else "is not an override"
            raise ConfigError("KEY=VALUE", word, reason, f"Write one of {', '.join(known)}")
        settings[key] = (
            value.split(",") if "," in value and "{" not in value else yaml.safe_load(value)
        )
    for key in ("target_modules", "target_parameters"):
        given = settings.get(key)
        if isinstance(given, str) and given not in ("all-linear", "linear-layers"):
            settings[key] = [given]
    return settings


def _blocks(
    plan: Plan,
    step: TransformersStep,
    device: DeviceLimits,
    verdict: str,
    asked_job: Job,
) -> list[Block]:
    peak = peak_of(device, plan.peak)
    largest = f"Largest that fits: {plan.largest}." if plan.largest else "Not even one row fits."
    devices = f"{step.ranks}{' x' * (step.ranks > 1)} {device.name}"
    rows_of = f"{'pairs of ' * step.has_pairs}rows of {step.max_length} tokens"
    lines = [
        f"{ROWS} {plan.rows}: {verdict}, peak {peak}. {largest}",
        f"{step.trainer} on {devices}, {rows_of}",
    ]
    if plan.with_retries:
        lines.append(caution_of_retries(f"with {plan.rows}"))
    elif verdict == "UNCERTAIN":
        lines.append(caution(device, f"with {plan.rows}"))
    if plan.experts and plan.experts.differ:
        even, worst = plan.experts.even, plan.experts.worst
        lines.append(
            f"Experts: {human_bytes(even.peak)} where all get as many tokens, {human_bytes(worst.peak)} "
            f"where all tokens go to the same; largest that fits: {even.largest} and {worst.largest}."
        )
    assumed = plan.assumptions
    if plan.experts and not plan.experts.differ:
        assumed = (*assumed, "experts: wherever routers send tokens, memory is the same")
    parts = sorted(plan.parts.items(), key=lambda part: -part[1])
    rows = [(name, human_bytes(size)) for name, size in parts if size >= 1 << 20]
    rows.append(("held by the allocator", human_bytes(plan.peak)))
    header = ("peak memory", f"at {plan.rows}")
    blocks: list[Block] = [Paragraph(lines, important=True), Table("", header, rows, right={1})]
    if plan.speed:
        fits = verdict != DOES_NOT_FIT
        blocks += speed_blocks(plan.speed, plan.rows, step.ranks, asked_job, fits, ROWS)
    return [*blocks, Listing("What is planned", assumed)]
