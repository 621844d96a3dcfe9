"""``tune-adaptive plan``: prints a prediction, and ends with an exit status."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.cli.answers import Answers
from torchtune_adaptive.cli.candidates_report import Fastest
from torchtune_adaptive.cli.hugging_face import METHODS, config_for, download_advice
from torchtune_adaptive.cli.job import Job, job
from torchtune_adaptive.cli.machine_options import MachineOptions
from torchtune_adaptive.cli.machine_options import add_arguments as add_machine_options
from torchtune_adaptive.cli.plan_plot import draw
from torchtune_adaptive.cli.plan_progress import TraceProgress
from torchtune_adaptive.cli.plan_report import PlanReport, WhatIfResult, as_dict, details, headline
from torchtune_adaptive.cli.transformers_plan import plan_transformers
from torchtune_adaptive.cli.what_if import WhatIf, splits, what_ifs
from torchtune_adaptive.common import (
    AdaptiveBatchingError,
    Block,
    ConfigError,
    NoPrediction,
    amount_of_memory,
    as_markdown,
    as_text,
    human_bytes,
    table,
)
from torchtune_adaptive.planner import DOES_NOT_FIT, DeviceLimits, Pace, gpus
from torchtune_adaptive.recipe import (
    HERE,
    KNOBS_BY_KEY,
    OnDevice,
    PlanRequest,
    Prediction,
    Query,
    compare,
    confirm,
    is_config_name,
    is_recipe,
    kind_of,
    largest_adapter_rank,
    load_config,
    merged,
    on_devices,
    other_builds,
    plan_request,
    predict,
    rank_candidates,
    warn_of_unused_keys,
    with_overrides,
)

_WHOSE_STEP = (
    "step: torchtune's; --step transformers plans that of transformers' Trainer and of TRL's"
)
EXIT_STATUS = {"FITS": 0, DOES_NOT_FIT: 1, "UNCERTAIN": 2}
NO_ANSWER = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``plan`` takes, for ``parsed``."""
    add = parser.add_argument
    add("--config", help="a config name or a YAML file")
    add(
        "--hf",
        type=Path,
        metavar="DIR",
        help="instead of a config: a folder with the config.json of a Hugging Face model (Llama, Mistral, "
        "Qwen2, Qwen3, Gemma, Phi-3; with --step transformers any causal language model)",
    )
    add(
        "--step",
        choices=("torchtune", "transformers"),
        default="torchtune",
        help="whose training step is planned of a --hf model: torchtune's, or that of transformers' Trainer "
        "and TRL's SFTTrainer and DPOTrainer, whose settings are then the overrides, e.g. trainer=DPOTrainer "
        "per_device_train_batch_size=4 (default: torchtune)",
    )
    add("--method", choices=METHODS, help="what is trained of a --hf model (default: full)")
    nproc = ("--nproc", "--nproc_per_node", "--nproc-per-node")
    add(*nproc, type=int, metavar="N", help="number of GPUs (default: 1)")
    device = parser.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu",
        help="GPU to plan for (see --list-gpus; torch's names are known as well; 2xNAME is two of them), "
        f"or `{HERE}` for this machine's GPU as measured by an earlier search (default: {gpus.DEFAULT})",
    )
    device.add_argument(
        "--memory",
        help="capacity of one process, e.g. 76GiB (instead of --gpu); not what a card is sold as",
    )
    add_machine_options(parser)
    length_help = (
        "tokens in a row: the length of the longest sample, or of the longest prompt of a rollout"
    )
    add("--seq-len", type=int, metavar="N", help=length_help)
    add("--tokens", metavar="N", help="tokens to train on, e.g. 52M, for hours and cost")
    price_help = "price of one GPU for an hour: one for all, or one for each of --compare"
    add("--price", metavar="P", help=price_help)
    add("--compare", metavar="GPU,GPU", help="also predict for these GPUs")
    add(
        "--fastest",
        action="store_true",
        help="find the fastest configuration of the same training at the same global batch, by knobs that "
        "trade memory for speed (instead of the comparison with alternative settings)",
    )
    add(
        "--may-change",
        metavar="WHAT",
        help="what --fastest may change: exact, rounding, or keys (default: adaptive_batching.may_change)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--markdown", action="store_true", help="print Markdown")
    add("--plot", type=Path, metavar="FILE", help="save a plot of peak memory (.png, .svg, .pdf)")
    skip_help = "skip the comparison with alternative settings (much faster)"
    add("--no-what-ifs", action="store_true", help=skip_help)
    add("--list-gpus", action="store_true", help="list known GPUs and exit")
    add(
        "words",
        nargs="*",
        metavar="[RECIPE] CONFIG [KEY=VALUE ...]",
        help="a config name or a YAML file, and config overrides, e.g. batch_size=8; a recipe's name, which "
        "`run` needs, may stand before it",
    )
    parser.set_defaults(func=lambda arguments: sys.exit(plan_command(arguments)))


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """What is asked. Overrides may stand anywhere, and options may have underscores, as torchrun's."""
    dashed = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in words]
    arguments, unknown = parser.parse_known_intermixed_args(dashed)
    as_given = dict(zip(dashed, words, strict=True))
    arguments.unknown = [as_given.get(word, word) for word in unknown]
    return arguments


def plan_command(arguments: argparse.Namespace) -> int:
    """Print a prediction; returns the exit status: 0 fits, 1 does not fit, 2 no prediction."""
    if arguments.list_gpus:
        print("\n".join(_gpu_table()))
        return 0
    try:
        return _plan(arguments)
    except AdaptiveBatchingError as error:
        kind, reason = type(error).__name__, str(error)
    if arguments.json:
        print(json.dumps({"verdict": None, "error": {"type": kind, "message": reason}}, indent=1))
    print(f"tune-adaptive plan: error: {reason}", file=sys.stderr)
    return NO_ANSWER


def _gpu_table() -> list[str]:
    rows = []
    for one in gpus.GPUS.values():
        amounts = map(human_bytes, (one.total, one.capacity(1), one.capacity(8)))
        rows.append((one.name, *amounts, "reported" if one.is_reported else "estimated"))
    header = ("GPU", "total", "capacity on 1 GPU", "on several", "the total is")
    return table(header, rows, right={1, 2, 3})


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.unknown:
        raise _no_option(*arguments.unknown[:2])
    memory = amount_of_memory("--memory", arguments.memory) if arguments.memory else None
    told = MachineOptions.of(arguments)
    ranks, gpu = _gpus(arguments.nproc, told.gpu, told.nodes)
    if arguments.seq_len is not None and arguments.seq_len < 2:
        raise ConfigError("--seq-len", arguments.seq_len, "is too short", "Use 2 tokens or more")
    if arguments.step == "transformers":
        if not arguments.hf:
            raise ConfigError("--step", "transformers", "is for --hf", "Give the folder of a model")
        return _plan_transformers(arguments, ranks, gpu, memory)
    name, cfg = _config(arguments)
    plan = plan_request(cfg, ranks, gpu, memory, arguments.seq_len, name, told.machine)
    if arguments.hf:
        plan = replace(plan, assumptions=(_WHOSE_STEP, *plan.assumptions))
    warn_of_unused_keys(cfg, kind_of(cfg))
    report = _predict(plan, arguments)
    if arguments.json:
        print(json.dumps(as_dict(report), indent=1))
    else:
        print(_rendered(details(report), arguments), end="")
    if arguments.plot is not None:
        draw(report, arguments.plot)
    return EXIT_STATUS[report.verdict]


def _plan_transformers(
    arguments: argparse.Namespace, ranks: int, gpu: str | None, memory: int | None
) -> int:
    blocks, as_json, verdict = plan_transformers(arguments, ranks, gpu, memory)
    if arguments.json:
        print(json.dumps(as_json, indent=1))
    else:
        print(_rendered(blocks, arguments), end="")
    return EXIT_STATUS[verdict]


def _no_option(option: str, following: str = "VALUE") -> ConfigError:
    """The error about ``--batch_size 4`` or ``--batch_size=4``."""
    option, equals, value = option.partition("=")
    value = value if equals else following
    key = option.strip("-").replace("-", "_")
    remedy = f"What a config has is written {key}={value}; --help lists the options"
    return ConfigError(option, value, "is not an option of plan", remedy)


def _gpus(
    nproc: int | None, gpu: str | None, nodes: tuple[int, int] | None = None
) -> tuple[int, str | None]:
    """The number of GPUs and the name of one, which may be given together: ``2x4090``."""
    if nproc is not None and nproc < 1:
        raise ConfigError("--nproc", nproc, "is not a number of GPUs", "Use 1 or more")
    numbers = {"--nproc": nproc} if nproc is not None else {}
    if nodes is not None:
        numbers["--nodes"] = nodes[0] * nodes[1]
    if together := re.fullmatch(r"([1-9]\d*) *x *(.+)", gpu or ""):
        gpu, numbers["--gpu"] = together[2], int(together[1])
    if len({*numbers.values()}) > 1:
        (one, first), (other, second), *_ = numbers.items()
        reason = f"GPUs contradict the {second} of {other}"
        raise ConfigError(
            one, first, reason, "Give all GPUs, of all nodes, or leave one of the two out"
        )
    return next(iter(numbers.values()), 1), gpu


def _rendered(blocks: Sequence[Block], arguments: argparse.Namespace) -> str:
    return as_markdown(blocks) if arguments.markdown else as_text(blocks)


def _config(arguments: argparse.Namespace) -> tuple[str, DictConfig]:
    """The name of the config, and the config with its overrides."""
    overrides = [word for word in arguments.words if "=" in word or word.startswith("~")]
    names = [word for word in arguments.words if word not in overrides]
    if names and is_recipe(names[0]):
        del names[0]  # which recipe it is for can be seen from the config
    if arguments.config:
        names.append(arguments.config)
    if len(names) > 1 - bool(arguments.hf):
        raise ConfigError("KEY=VALUE", names[0], "is not an override", "Write key=value")
    if arguments.hf:
        cfg = config_for(arguments.hf, arguments.method or "full")
        return arguments.hf.resolve().name, with_overrides(cfg, overrides)
    if arguments.method:
        remedy = "Use a config of that method"
        raise ConfigError("--method", arguments.method, "is for --hf", remedy)
    if not names:
        raise AdaptiveBatchingError(
            "no config is given. Give a config name such as llama3_1/8B_full, a YAML file, or --hf"
        )
    return names[0], with_overrides(_config_or_advice(names[0]), overrides)


def _config_or_advice(name: str) -> DictConfig:
    """The config of a name, which may be that of a model instead."""
    try:
        return load_config(name)
    except ConfigError:
        if is_config_name(name) or not (advice := download_advice(name)):
            raise
        raise ConfigError("CONFIG", name, "is not a config", advice) from None


def _predict(plan: PlanRequest, arguments: argparse.Namespace) -> PlanReport:
    """Predict everything at once; the headline is printed as soon as it is known."""
    in_detail = arguments.plot is not None
    fastest = arguments.fastest or arguments.may_change is not None
    if fastest and plan.pace is None:
        raise NoPrediction(f"--fastest: {plan.assumptions[-1]}.")
    rollouts = kind_of(plan.cfg).generates
    if rollouts:
        _require_no_comparison(arguments)
    alternatives = [] if arguments.no_what_ifs or fastest or rollouts else list(what_ifs(plan))
    devices = on_devices(plan, arguments.compare) if arguments.compare else []
    asked_job = _job(plan, arguments, devices)
    lora = kind_of(plan.cfg).adapters
    expected = 2 - (fastest or rollouts) + len(alternatives) + (lora and bool(alternatives))
    with TraceProgress(expected) as progress, Answers(plan.settings.cache) as answers:

        def ask(work: Callable[..., Any], query: Query, *others: Any) -> Future[Any]:
            if work is rank_candidates:
                progress.expect_more(1)
            answer = answers.ask(work, query, *others)
            progress.follow(answer)
            return answer

        query = plan.query(in_detail=in_detail, confirmed=rollouts)
        configured = ask(predict, query)
        ranked = _ask_for_candidates(plan, arguments.may_change, ask) if fastest else None
        others = [ask(predict, replace(one.query, in_detail=in_detail)) for one in alternatives]
        progress.wait(configured)
        try:
            found: Prediction = configured.result()
        finally:
            answers.checked()  # if it failed, that explains any other failure
        if not arguments.json:
            progress.print(_rendered(headline(plan, found, asked_job), arguments))
        if alternatives and found.verdict(plan.device) == DOES_NOT_FIT:
            more = list(splits(plan))
            progress.expect_more(len(more))
            alternatives += more
            others += [ask(predict, replace(one.query, in_detail=in_detail)) for one in more]
        # Asked last: they use the traces of those above.
        confirmed = last = by_rank = None
        if not fastest and not rollouts:
            lengths = (plan.length // 2, 2 * plan.length, 4 * plan.length) if alternatives else ()
            confirmed = ask(confirm, query, lengths)
        if found.uneven:
            progress.expect_more(1)
            other = 0 if found.rank == plan.ranks - 1 else plan.ranks - 1
            last = ask(predict, plan.query(rank=other))
        compared: Future[list[OnDevice]] | None = None
        if devices:
            progress.expect_more(1)
            compared = ask(compare, plan.query(), devices)
        if alternatives and lora:
            by_rank = ask(largest_adapter_rank, query)
        progress.wait()
        prediction, by_length = confirmed.result() if confirmed else (found, None)
        return PlanReport(
            plan,
            prediction,
            first_answer=found,
            last_rank=last.result() if last else None,
            outcomes=[*map(_outcome, alternatives, others)],
            by_length=by_length,
            adapter_rank=by_rank.result() if by_rank else None,
            job=asked_job,
            compared=compared.result() if compared else (),
            fastest=ranked(prediction) if ranked else None,
        )


def _job(
    plan: PlanRequest,
    arguments: argparse.Namespace,
    devices: Sequence[tuple[DeviceLimits, Pace | None]],
) -> Job:
    """The job that is asked for; ``devices`` are those of ``--compare``."""
    names = (arguments.compare or "").split(",")
    compared = [
        limits.name if name.strip() == HERE else name
        for name, (limits, _) in zip(names, devices, strict=False)
    ]
    return job(arguments.tokens, arguments.price, plan.gpu, compared)


def _require_no_comparison(arguments: argparse.Namespace) -> None:
    """Raise if something is asked that is about steps alone, and rows are generated."""
    for option in ("fastest", "may_change", "compare", "plot"):
        if getattr(arguments, option):
            name = f"--{option.replace('_', '-')}"
            raise NoPrediction(
                f"{name} is not for recipes that generate the rows that they train on. Leave it out."
            )


def _ask_for_candidates(
    plan: PlanRequest, may_change: str | None, ask: Callable[..., Future[Any]]
) -> Callable[[Prediction], Fastest]:
    """Start ranking the candidates, one process for each model that has to be built."""
    allowed: Any = may_change or plan.settings.may_change
    if isinstance(allowed, str) and allowed not in ("exact", "rounding"):
        allowed = tuple(key.strip() for key in allowed.split(","))
    for key in allowed if isinstance(allowed, tuple) else ():
        if key not in KNOBS_BY_KEY:
            remedy = f"Use exact, rounding, or some of {', '.join(KNOBS_BY_KEY)}"
            raise ConfigError("--may-change", key, "is not a knob that may be chosen", remedy)
    builds = [plan, *(replace(plan, cfg=c) for c in other_builds(plan.cfg, plan.ranks, allowed))]
    asked = [ask(rank_candidates, one.query(), allowed, None, True) for one in builds]

    def ranked(prediction: Prediction) -> Fastest:
        found = [one.result() for one in asked]
        return Fastest(plan, merged(plan.cfg, found, prediction, plan.device.usable_bytes), allowed)

    return ranked


def _outcome(asked: WhatIf, done: Future[Prediction]) -> WhatIfResult:
    try:
        return WhatIfResult(asked.name, done.result(), override=asked.override)
    except AdaptiveBatchingError as error:
        return WhatIfResult(asked.name, None, str(error), asked.override)
