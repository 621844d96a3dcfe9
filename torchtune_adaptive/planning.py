"""``tune-adaptive plan``: from a command line to a prediction and an exit status."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import amount_of_memory
from torchtune_adaptive.errors import AdaptiveBatchingError, ConfigError
from torchtune_adaptive.gpus import DEFAULT, GIB, GPUS
from torchtune_adaptive.plan import Answer, Plan, make_plan, processes
from torchtune_adaptive.plan_report import Outcome, answer_text, as_dict, draw, table_text
from torchtune_adaptive.registry import find_config
from torchtune_adaptive.what_if import what_ifs

HELP = "Predict what fits, without a GPU, weights, tokenizer or data."
EXIT_STATUS = {"FITS": 0, "DOES NOT FIT": 1, "UNCERTAIN": 2}
NO_ANSWER = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="a config's name or file")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks (default: 1)")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", help=f"a known device (default: {DEFAULT})")
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


def _predict(arguments: argparse.Namespace) -> int:
    memory = amount_of_memory("--memory", arguments.memory) if arguments.memory else None
    if arguments.nproc < 1:
        raise ConfigError("--nproc", arguments.nproc, "is not a number of ranks", "Use 1 or more")
    plan = make_plan(_config(arguments), arguments.nproc, arguments.gpu, memory)
    longest = plan.cfg.model.get("max_seq_len") or 1 << 17
    lengths = [n for n in (plan.length // 2, 2 * plan.length, 4 * plan.length) if 2 <= n <= longest]
    in_detail = arguments.plot is not None
    outcomes: list[Outcome] = []
    with processes() as ask:
        asked = ask(
            plan.question(other_lengths=tuple(lengths), in_detail=in_detail, confirmed=True)
        )
        others = {}
        if not arguments.no_what_ifs:
            for one in what_ifs(plan):
                others[ask(replace(one.question, in_detail=in_detail))] = one.name
        found = asked.result()
        if not arguments.json:
            print(answer_text(plan, found, arguments.config), flush=True)
        for done in as_completed(others):
            try:
                outcomes.append(Outcome(others[done], done.result()))
            except AdaptiveBatchingError as error:
                outcomes.append(Outcome(others[done], None, str(error)))
    _show(arguments, plan, found, outcomes)
    return EXIT_STATUS[found.configured.verdict(plan.device)]


def _show(
    arguments: argparse.Namespace, plan: Plan, found: Answer, outcomes: Sequence[Outcome]
) -> None:
    if arguments.json:
        print(json.dumps(as_dict(plan, found, outcomes), indent=1))
    elif outcomes:
        print(table_text(plan, found, outcomes))
    if arguments.plot is not None:
        draw(plan, found, outcomes, arguments.plot)


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
