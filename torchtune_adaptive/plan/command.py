"""``tune-adaptive plan``: from a command line to a prediction and an exit status."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import BrokenExecutor, Future, as_completed
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import AdaptiveBatchingError, ConfigError
from torchtune_adaptive.memory_model.gpus import DEFAULT, GIB, GPUS
from torchtune_adaptive.plan.predict import Prediction, Query, predict, processes
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
from torchtune_adaptive.registry import find_config
from torchtune_adaptive.settings.adaptive import amount_of_memory

HELP = "Predict what fits, without a GPU, weights, tokenizer or data."
EXIT_STATUS = {"FITS": 0, "DOES NOT FIT": 1, "UNCERTAIN": 2}
NO_ANSWER = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="a config's name or file")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks (default: 1)")
    device = parser.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu", help=f"a known device, or {HERE}: as searches found it (default: {DEFAULT})"
    )
    device.add_argument("--memory", help="what a process can get of its device, as 76GiB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.png, .svg, .pdf)")
    parser.add_argument("--no-what-ifs", action="store_true", help="only the config as it is")
    parser.add_argument("--list-gpus", action="store_true", help="name the known devices, and stop")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the config")
    parser.set_defaults(func=lambda arguments: sys.exit(plan_command(arguments)))


def plan_command(arguments: argparse.Namespace) -> int:
    """Print a prediction; gives the exit status: 0 fits, 1 does not, 2 no answer."""
    if arguments.list_gpus:
        for gpu in GPUS.values():
            print(f"{gpu.name:<14}{gpu.gib:8.2f} GiB, usable {gpu.usable(8) / GIB:.2f} GiB")
        return 0
    try:
        return _predict(arguments)
    except AdaptiveBatchingError as error:
        print(f"tune-adaptive plan: {type(error).__name__}: {error}", file=sys.stderr)
        return NO_ANSWER
    except BrokenExecutor:
        print(
            "tune-adaptive plan: a process that traced was ended from outside, perhaps because this "
            "machine has too little memory for it (each takes half a GiB).",
            file=sys.stderr,
        )
        return NO_ANSWER


def _predict(arguments: argparse.Namespace) -> int:
    memory = amount_of_memory("--memory", arguments.memory) if arguments.memory else None
    if arguments.nproc < 1:
        raise ConfigError("--nproc", arguments.nproc, "is not a number of ranks", "Use 1 or more")
    plan = plan_request(_config(arguments), arguments.nproc, arguments.gpu, memory)
    in_detail = arguments.plot is not None
    with processes() as run:

        def ask(question: Query) -> Future[Prediction]:
            return run(predict, question)

        checked = run(_check_method, plan.cache)
        asked = ask(plan.question(in_detail=in_detail, confirmed=True))
        others: dict[Future[Prediction], str] = {}
        if not arguments.no_what_ifs:
            for one in what_ifs(plan):
                others[ask(replace(one.question, in_detail=in_detail))] = one.name
        checked.result()
        found = asked.result()
        if not arguments.json:
            print(headline_text(plan, found, arguments.config), flush=True)
        # Asked only now, because they are about what has been traced already.
        last = ask(plan.question(rank=plan.ranks - 1)) if found.uneven else None
        lengths = ask(plan.question(other_lengths=_other_lengths(plan))) if others else None
        outcomes = [_outcome(others[done], done) for done in as_completed(others)]
        told = PlanReport(
            plan,
            found,
            last_rank=last.result() if last else None,
            outcomes=outcomes,
            lengths=lengths.result().lengths if lengths else {},
        )
    if arguments.json:
        print(json.dumps(as_dict(told), indent=1))
    else:
        print(details_text(told), end="")
    if arguments.plot is not None:
        draw(told, arguments.plot)
    return EXIT_STATUS[told.verdict]


def _check_method(cache: bool | str) -> None:
    from torchtune_adaptive.trace.self_check import check_method  # not where commands are read

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
        raise ConfigError("--config", None, "is missing", "Give the name of a config, or its file")
    for override in arguments.overrides:
        if "=" not in override:
            raise ConfigError("KEY=VALUE", override, "is not an override", "Write key=value")
    loaded = OmegaConf.load(find_config(arguments.config))
    merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(arguments.overrides))
    assert isinstance(merged, DictConfig)
    return merged
