"""``tune-adaptive plan``: prints a prediction, and ends with an exit status."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import BrokenExecutor, Future, as_completed
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import AdaptiveBatchingError, ConfigError
from torchtune_adaptive.memory_model.gpus import DEFAULT, GPUS
from torchtune_adaptive.plan.predict import Prediction, Query, predict
from torchtune_adaptive.plan.report import (
    PlanReport,
    WhatIfResult,
    as_dict,
    details_text,
    draw,
    headline_text,
)
from torchtune_adaptive.plan.request import HERE, PlanRequest, plan_request
from torchtune_adaptive.plan.what_if import what_ifs
from torchtune_adaptive.plan.workers import processes
from torchtune_adaptive.registry import load_config
from torchtune_adaptive.settings.adaptive import amount_of_memory
from torchtune_adaptive.text import human_bytes, table

HELP = "Predict peak memory and the largest micro-batch, without a GPU, weights or data."
EXIT_STATUS = {"FITS": 0, "DOES NOT FIT": 1, "UNCERTAIN": 2}
NO_ANSWER = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", help="a config name or a YAML file")
    add(
        *("--nproc", "--nproc_per_node"),
        type=int,
        default=1,
        metavar="N",
        help="number of GPUs (default: 1)",
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu",
        help=f"GPU to plan for (see --list-gpus), or `{HERE}` for this machine's GPU as measured by an "
        f"earlier search (default: {DEFAULT})",
    )
    device.add_argument(
        "--memory", help="memory available to one process, e.g. 76GiB (instead of --gpu)"
    )
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="FILE", help="save a plot of peak memory (.png, .svg, .pdf)")
    add(
        "--no-what-ifs",
        action="store_true",
        help="skip the comparison with alternative settings (much faster)",
    )
    add("--list-gpus", action="store_true", help="list known GPUs and exit")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="config overrides, e.g. batch_size=8")
    parser.set_defaults(func=lambda arguments: sys.exit(plan_command(arguments)))


def plan_command(arguments: argparse.Namespace) -> int:
    """Print a prediction; returns the exit status: 0 fits, 1 does not fit, 2 no prediction."""
    if arguments.list_gpus:
        print("\n".join(_gpu_table()))
        return 0
    try:
        return _plan(arguments)
    except AdaptiveBatchingError as error:
        reason = str(error)
    except BrokenExecutor:
        reason = (
            "a process that traced was killed, perhaps because this machine has too little memory for it "
            "(each takes half a GiB)."
        )
    print(f"tune-adaptive plan: error: {reason}", file=sys.stderr)
    return NO_ANSWER


def _gpu_table() -> list[str]:
    rows = [
        (one.name, *map(human_bytes, (one.capacity, one.available(1), one.available(8))))
        for one in GPUS.values()
    ]
    header = ("GPU", "capacity", "available on 1 GPU", "on several")
    return table(header, rows, right={1, 2, 3})


def _plan(arguments: argparse.Namespace) -> int:
    memory = amount_of_memory("--memory", arguments.memory) if arguments.memory else None
    if arguments.nproc < 1:
        raise ConfigError("--nproc", arguments.nproc, "is not a number of GPUs", "Use 1 or more")
    plan = plan_request(_config(arguments), arguments.nproc, arguments.gpu, memory)
    report = _predict(plan, arguments)
    if arguments.json:
        print(json.dumps(as_dict(report), indent=1))
    else:
        print(details_text(report), end="")
    if arguments.plot is not None:
        draw(report, arguments.plot)
    return EXIT_STATUS[report.verdict]


def _predict(plan: PlanRequest, arguments: argparse.Namespace) -> PlanReport:
    """Predict everything at once; the headline is printed as soon as it is known."""
    in_detail = arguments.plot is not None
    with processes() as run:

        def start(query: Query) -> Future[Prediction]:
            return run(predict, query)

        checked = run(_check_method, plan.cache)
        configured = start(plan.query(in_detail=in_detail, confirmed=True))
        others: dict[Future[Prediction], str] = {}
        if not arguments.no_what_ifs:
            for one in what_ifs(plan):
                others[start(replace(one.query, in_detail=in_detail))] = one.name
        checked.result()
        found = configured.result()
        if not arguments.json:
            print(headline_text(plan, found, arguments.config), flush=True)
        # Started last: they use the traces of those above.
        last = start(plan.query(rank=plan.ranks - 1)) if found.uneven else None
        lengths = start(plan.query(other_lengths=_other_lengths(plan))) if others else None
        outcomes = [_outcome(others[done], done) for done in as_completed(others)]
        return PlanReport(
            plan,
            found,
            last_rank=last.result() if last else None,
            outcomes=outcomes,
            lengths=lengths.result().lengths if lengths else {},
        )


def _check_method(cache: bool | str) -> None:
    from torchtune_adaptive.trace.self_check import (
        check_method,
    )  # torch, which only the worker needs

    check_method(cache)


def _other_lengths(plan: PlanRequest) -> tuple[int, ...]:
    longest = plan.cfg.model.get("max_seq_len") or 1 << 17
    lengths = (plan.length // 2, 2 * plan.length, 4 * plan.length)
    return tuple(length for length in lengths if 2 <= length <= longest)


def _outcome(name: str, done: Future[Prediction]) -> WhatIfResult:
    try:
        return WhatIfResult(name, done.result())
    except AdaptiveBatchingError as error:
        return WhatIfResult(name, None, str(error))


def _config(arguments: argparse.Namespace) -> DictConfig:
    if not arguments.config:
        raise AdaptiveBatchingError(
            "--config is required (a config name such as llama3_1/8B_full, or a YAML file)"
        )
    for override in arguments.overrides:
        if "=" not in override:
            raise ConfigError("KEY=VALUE", override, "is not an override", "Write key=value")
    loaded = load_config(arguments.config)
    merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(arguments.overrides))
    assert isinstance(merged, DictConfig)
    return merged
