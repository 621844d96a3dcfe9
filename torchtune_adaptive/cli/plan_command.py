"""``plan`` of a config: prints a prediction of torchtune's step. It needs the recipes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.cli.answers import Answers
from torchtune_adaptive.cli.candidates_report import Fastest
from torchtune_adaptive.cli.hub import instead_of_config
from torchtune_adaptive.cli.job import Job, job
from torchtune_adaptive.cli.page_questions import PageTables, tables_for
from torchtune_adaptive.cli.plan_page import write_page
from torchtune_adaptive.cli.plan_progress import Interrupted, TraceProgress
from torchtune_adaptive.cli.plan_report import (
    PlanReport,
    WhatIfResult,
    as_dict,
    details,
    headline,
)
from torchtune_adaptive.cli.what_if import WhatIf, splits, what_ifs
from torchtune_adaptive.common import AdaptiveBatchingError, ConfigError, NoPrediction
from torchtune_adaptive.planner import (
    DOES_NOT_FIT,
    Answer,
    DeviceLimits,
    Machine,
    Pace,
    gpus,
)
from torchtune_adaptive.recipe import (
    KNOBS_BY_KEY,
    PlanRequest,
    Prediction,
    Query,
    compare,
    confirm,
    is_config_name,
    is_recipe,
    largest_adapter_rank,
    load_config,
    merged,
    on_devices,
    other_builds,
    plan_request,
    predict,
    rank_candidates,
    tabulated,
    warn_of_unused_keys,
    with_overrides,
)

_LENGTHS = ("max_seq_len", "max_length", "seq_len")

_WORK: dict[Callable[..., Any], str] = {
    predict: "alternatives",
    confirm: "the check of the largest size",
    compare: "--compare",
    largest_adapter_rank: "the highest adapter rank",
    rank_candidates: "--fastest",
    tabulated: "the page",
}
"""What is found after the first answer."""


def plan_config(
    arguments: argparse.Namespace, ranks: int, gpu: str | None, memory: int | None, machine: Machine
) -> str:
    """Print a prediction; returns its verdict."""
    name, cfg = _config(arguments)
    again = partial(
        plan_request,
        cfg=cfg,
        ranks=ranks,
        gpu_name=gpu,
        memory=memory,
        length=arguments.seq_len,
        name=name,
        machine=machine,
    )
    plan = again()
    warn_of_unused_keys(cfg, plan.asked.kind)
    tables = tables_for(plan, arguments, again)
    try:
        report = _predict(plan, arguments, tables)
    except Interrupted as end:
        print(end, file=sys.stderr)
        if tables:
            write_page(arguments.html, tables.page(arguments))
        return end.verdict
    if arguments.json:
        print(json.dumps(as_dict(report), indent=1))
    else:
        print(arguments.render(details(report)), end="")
    if tables:
        write_page(arguments.html, tables.page(arguments))
    return report.verdict


def _config(arguments: argparse.Namespace) -> tuple[str, DictConfig]:
    """The name of the config, and the config with its overrides."""
    overrides = [word for word in arguments.words if "=" in word or word.startswith("~")]
    names = [word for word in arguments.words if word not in overrides]
    if names and is_recipe(names[0]):
        del names[0]  # which recipe it is for can be seen from the config
    if arguments.config:
        names.append(arguments.config)
    if len(names) > 1:
        raise ConfigError("KEY=VALUE", names[0], "is not an override", "Write key=value")
    if arguments.method:
        remedy = "Use a config of that method"
        raise ConfigError("--method", arguments.method, "is for --hf", remedy)
    if not names:
        raise AdaptiveBatchingError(
            "no config is given. Give a config name such as llama3_1/8B_full, a YAML file, or --hf"
        )
    return names[0], _changed(_config_or_advice(names[0]), overrides)


def _changed(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A config with its overrides. Length is an option: no recipe has a key for it, though a config may have
    a variable of that name."""
    for key, _, value in (override.partition("=") for override in overrides):
        if key in _LENGTHS and key not in cfg:
            raise ConfigError(key, value, "is not a key of this config", f"Write --seq-len {value}")
    return with_overrides(cfg, overrides)


def _config_or_advice(name: str) -> DictConfig:
    """The config of a name, which may be that of a model instead."""
    try:
        return load_config(name)
    except ConfigError:
        is_model = not (Path(name).is_file() or is_config_name(name))
        if not is_model or not (advice := instead_of_config(name)):
            raise
        raise ConfigError("CONFIG", name, "is not a config", advice) from None


def _predict(
    plan: PlanRequest, arguments: argparse.Namespace, tables: PageTables | None = None
) -> PlanReport:
    """Predict everything at once; the headline is printed as soon as it is known."""
    fastest = arguments.fastest or arguments.may_change is not None
    if fastest and plan.pace is None:
        raise NoPrediction(f"--fastest: {plan.assumptions[-1]}.")
    rollouts = plan.asked.kind.generates
    if rollouts:
        _require_no_comparison(arguments)
    alternatives = [] if arguments.no_what_ifs or fastest or rollouts else list(what_ifs(plan))
    devices = on_devices(plan, arguments.compare) if arguments.compare else []
    asked_job = _job(plan, arguments, devices)
    lora = plan.asked.kind.adapters
    expected = 2 - (fastest or rollouts) + len(alternatives) + (lora and bool(alternatives))
    answers = Answers(plan.asked.settings.cache)
    with TraceProgress(expected, answers.told_of) as progress, answers:

        def ask(work: Callable[..., Any], query: Query, *others: Any) -> Future[Any]:
            if work is rank_candidates:
                progress.expect_more(1)
            answer = answers.ask(work, query, *others)
            progress.follow(answer, _WORK[work])
            return answer

        query = plan.query(confirmed=rollouts)
        configured = answers.ask(predict, replace(query, beside=True), urgent=True)
        progress.follow(configured, "the first answer")
        ranked = _ask_for_candidates(plan, arguments.may_change, ask) if fastest else None
        others = [ask(predict, one.query) for one in alternatives]
        progress.wait(configured)
        try:
            found: Prediction = configured.result()
        finally:
            answers.checked()  # if it failed, that explains any other failure
        verdict = found.verdict(plan.device)
        if not arguments.json:
            progress.print(arguments.render(headline(plan, found, asked_job)), verdict)
        if alternatives and verdict == DOES_NOT_FIT:
            more = list(splits(plan))
            progress.expect_more(len(more))
            alternatives += more
            others += [ask(predict, one.query) for one in more]
        # Asked last: they use the traces of those above.
        confirmed = last = by_rank = None
        if not fastest and not rollouts:
            lengths = (plan.length // 2, 2 * plan.length, 4 * plan.length) if alternatives else ()
            confirmed = ask(confirm, query, lengths)
        if found.uneven:
            progress.expect_more(1)
            other = 0 if found.rank == plan.ranks - 1 else plan.ranks - 1
            last = ask(predict, plan.query(rank=other))
        compared: Future[list[Answer]] | None = None
        if devices:
            progress.expect_more(1)
            compared = ask(compare, plan.query(), devices)
        if alternatives and lora:
            by_rank = ask(largest_adapter_rank, query)

        def report() -> PlanReport:
            """What is known by now."""
            prediction, by_length = _known(confirmed) or (found, None)
            known = [
                (alternative, done)
                for alternative, done in zip(alternatives, others, strict=True)
                if _is_known(done)
            ]
            return PlanReport(
                plan,
                prediction,
                first_answer=found,
                last_rank=_known(last),
                outcomes=[_outcome(*one) for one in known],
                by_length=by_length,
                adapter_rank=_known(by_rank),
                job=asked_job,
                compared=_known(compared) or (),
                fastest=ranked(prediction) if ranked else None,
            )

        try:
            progress.wait()
            if tables:
                tables.ask(ask, progress)
        except KeyboardInterrupt:
            if not (arguments.json or ranked):
                with suppress(AdaptiveBatchingError):  # the user does not wait for what has failed
                    progress.print(arguments.render(details(report())), verdict)
            raise
        return report()


def _is_known(answer: Future[Any]) -> bool:
    return answer.done() and not answer.cancelled()


def _known(answer: Future[Any] | None) -> Any:
    """An answer that was asked for, once it is there; else None."""
    return answer.result() if answer is not None and _is_known(answer) else None


def _job(
    plan: PlanRequest,
    arguments: argparse.Namespace,
    devices: Sequence[tuple[DeviceLimits, Pace | None]],
) -> Job:
    """The job that is asked for; ``devices`` are those of ``--compare``."""
    names = (arguments.compare or "").split(",")
    compared = [
        limits.name if name.strip() == gpus.HERE else name
        for name, (limits, _) in zip(names, devices, strict=False)
    ]
    return job(arguments.tokens, arguments.price, plan.gpu, compared)


def _require_no_comparison(arguments: argparse.Namespace) -> None:
    """Raise if something is asked that is about steps alone, and rows are generated."""
    for option in ("fastest", "may_change", "compare"):
        if getattr(arguments, option):
            name = f"--{option.replace('_', '-')}"
            raise NoPrediction(
                f"{name} is not for recipes that generate the rows that they train on. Leave it out."
            )


def _ask_for_candidates(
    plan: PlanRequest, may_change: str | None, ask: Callable[..., Future[Any]]
) -> Callable[[Prediction], Fastest]:
    """Start ranking the candidates, one process for each model that has to be built."""
    allowed: Any = may_change or plan.asked.settings.may_change
    if isinstance(allowed, str) and allowed not in ("exact", "rounding"):
        allowed = tuple(key.strip() for key in allowed.split(","))
    for key in allowed if isinstance(allowed, tuple) else ():
        if key not in KNOBS_BY_KEY:
            remedy = f"Use exact, rounding, or some of {', '.join(KNOBS_BY_KEY)}"
            raise ConfigError("--may-change", key, "is not a knob that may be chosen", remedy)
    builds = [
        plan,
        *(replace(plan, asked=other) for other in other_builds(plan.asked, plan.ranks, allowed)),
    ]
    asked = [ask(rank_candidates, one.query(), allowed, True) for one in builds]

    def ranked(prediction: Prediction) -> Fastest:
        found = [one.result() for one in asked]
        return Fastest(
            plan, merged(plan.asked, found, prediction, plan.device.usable_bytes), allowed
        )

    return ranked


def _outcome(asked: WhatIf, done: Future[Prediction]) -> WhatIfResult:
    try:
        return WhatIfResult(asked.name, done.result(), override=asked.override)
    except AdaptiveBatchingError as error:
        return WhatIfResult(asked.name, None, str(error), asked.override)
