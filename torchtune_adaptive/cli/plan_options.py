"""``tune-adaptive plan``: its options, whose step is planned, and the exit status."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from torchtune_adaptive.cli.asked_program import AskedProgram
from torchtune_adaptive.cli.hub import model_of, require_config
from torchtune_adaptive.cli.machine_options import add_arguments as add_machine_options
from torchtune_adaptive.cli.machine_options import machine_told
from torchtune_adaptive.cli.other_trainers.files import TrainerFile, read_file
from torchtune_adaptive.cli.program_plan import plan_of_program
from torchtune_adaptive.cli.program_words import assumed, require_program, split
from torchtune_adaptive.cli.recipes import require_recipes
from torchtune_adaptive.cli.transformers_plan import METHODS, asked_trainer
from torchtune_adaptive.common import (
    AdaptiveBatchingError,
    ConfigError,
    amount_of_memory,
    as_markdown,
    as_text,
    human_bytes,
    printable,
    table,
)
from torchtune_adaptive.planner import DOES_NOT_FIT, gpus, programs

EXIT_STATUS = {"FITS": 0, DOES_NOT_FIT: 1, "UNCERTAIN": 2}
NO_ANSWER = 2
INTERRUPTED = 128 + signal.SIGINT  # as a shell reports it
_EXAMPLES = """\
examples:
  does it fit, what is the largest micro-batch, and how fast is it:
    tune-adaptive plan llama3_1/8B_lora_single_device --gpu 4090 --no-what-ifs
  longer rows, and what to pay:
    tune-adaptive plan llama3_1/8B_full --nproc 8 --gpu h100 --seq-len 8192 --tokens 50M --price 2.5
  which GPU, and the fastest configuration:
    tune-adaptive plan llama3_1/8B_qlora_single_device --compare 4090,a6000,h100
    tune-adaptive plan llama3_1/8B_full --nproc 8 --gpu h100 --fastest
  a model of the Hub, by its config.json, as TRL trains it:
    tune-adaptive plan --hf Qwen/Qwen3-8B --method lora --gpu 4090 dtype=bfloat16
  what a program of one's own trains, run to its third step on a GPU that is not there:
    tune-adaptive plan train.py --lr 1e-4 --gpu 4090
    tune-adaptive plan --gpu 4090 -m trl sft --config sft.yaml
  what a file of Axolotl, LLaMA-Factory or TRL trains:
    tune-adaptive plan axolotl.yaml --gpu 4090 micro_batch_size=4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``plan`` takes, for ``parsed``."""
    add = parser.add_argument
    add("--config", help="a config name or a YAML file")
    add(
        "--hf",
        metavar="MODEL",
        help="instead of a config: any causal language model of transformers, as the name of a model of the "
        "Hugging Face Hub (ORG/NAME), of which only config.json is downloaded, or a folder with that file",
    )
    add(
        "--trainer",
        help="whose step to plan for a --hf model: transformers' Trainer's or that of one of TRL's trainers, "
        "whose settings are the overrides, e.g. per_device_train_batch_size=4 (default: SFTTrainer)",
    )
    add(
        "--accelerate",
        type=Path,
        metavar="FILE",
        help="with a file of another trainer: the accelerate configuration that it is launched with",
    )
    add("--method", choices=METHODS, help="parameters to train of a --hf model (default: full)")
    nproc = ("--nproc", "--nproc_per_node", "--nproc-per-node")
    add(*nproc, type=int, metavar="N", help="number of GPUs (default: 1)")
    device = parser.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu",
        help="GPU to plan for (see --list-gpus; torch's names are known as well; 2xNAME is two of them), "
        f"or `{gpus.HERE}` for this machine's GPU as measured by an earlier search (default: {gpus.DEFAULT})",
    )
    device.add_argument(
        "--memory",
        help="capacity of one process, e.g. 76GiB (instead of --gpu); not what a card is sold as",
    )
    add_machine_options(parser)
    length_help = (
        "tokens in a row: the length of the longest sample, or of the longest prompt of a rollout"
    )
    add("--seq-len", "--max-seq-len", "--max-length", type=int, metavar="N", help=length_help)
    add("--rows", type=int, metavar="N", help="rows in a batch of a program, if not its own number")
    assume_help = (
        "the value that a program asks for at a place, e.g. train.py:31=0.5, as an error says"
    )
    add("--assume", action="append", metavar="PLACE=VALUE", help=assume_help)
    show_help = "show what a program prints, on stderr, and the traceback where it fails"
    add("--show-output", action="store_true", help=show_help)
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
    output.add_argument(
        "--markdown",
        action="store_const",
        dest="render",
        const=as_markdown,
        default=as_text,
        help="print Markdown",
    )
    html_help = (
        "save one page of HTML on which rows, their length, GPUs and checkpointing can be changed"
    )
    add("--html", type=Path, metavar="FILE", help=html_help)
    skip_help = "skip the comparison with alternative settings (much faster)"
    add("--no-what-ifs", action="store_true", help=skip_help)
    add("--list-gpus", action="store_true", help="list known GPUs and exit")
    add(
        "words",
        nargs="*",
        metavar="[RECIPE] CONFIG [KEY=VALUE ...]",
        help="a config name or a YAML file, which may be Axolotl's, LLaMA-Factory's or TRL's, and config "
        "overrides, e.g. batch_size=8; a recipe's name, which `run` needs, may stand before it",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # for the examples
    parser.epilog = _EXAMPLES
    parser.set_defaults(func=lambda arguments: sys.exit(plan_command(arguments)))


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """What is asked. Overrides may stand anywhere, and options may have underscores, as torchrun's."""
    words, program = split(words)
    dashed = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in words]
    arguments, unknown = parser.parse_known_intermixed_args(dashed)
    as_given = dict(zip(dashed, words, strict=True))
    arguments.program = program
    arguments.unknown = [as_given.get(word, word) for word in unknown]
    return arguments


def plan_command(arguments: argparse.Namespace) -> int:
    """Print a prediction; returns the exit status: 0 fits, 1 does not, 2 no prediction, 130 interrupted."""
    if arguments.list_gpus:
        print("\n".join(_gpu_table()))
        return 0
    try:
        return _plan(arguments)
    except AdaptiveBatchingError as error:
        kind, reason = type(error).__name__, str(error)
    except KeyboardInterrupt:
        print("tune-adaptive plan: interrupted before the first answer", file=sys.stderr)
        return INTERRUPTED
    if arguments.json:
        print(json.dumps({"verdict": None, "error": {"type": kind, "message": reason}}, indent=1))
    print(printable(f"tune-adaptive plan: error: {reason}"), file=sys.stderr)
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
    gpu, nodes, machine = machine_told(arguments)
    if arguments.seq_len is not None and arguments.seq_len < 2:
        raise ConfigError("--seq-len", arguments.seq_len, "is too short", "Use 2 tokens or more")
    ranks, gpu = _gpus(arguments.nproc, gpu, nodes)
    told = ranks if ranks > 1 or arguments.nproc else None  # else a launcher says
    arguments.gpu = gpu
    with ExitStack() as stack:
        if asked := _asked_program(arguments, told, stack):
            return EXIT_STATUS[plan_of_program(arguments, asked, memory, machine)]
    for option in ("rows", "assume", "show-output", "trainer", "method"):
        if (value := getattr(arguments, option.replace("-", "_"))) not in (None, False):
            needed = "--hf" if option in ("trainer", "method") else "a program"
            raise ConfigError(f"--{option}", str(value), f"is for {needed}", "Leave it out")
    require_recipes("plan without --hf MODEL")
    from torchtune_adaptive.cli.plan_command import plan_config

    return EXIT_STATUS[plan_config(arguments, ranks, gpu, memory, machine)]


def _asked_program(
    arguments: argparse.Namespace, ranks: int | None, stack: ExitStack
) -> AskedProgram | None:
    """The program that is to be planned; None for a config of torchtune's. ``stack`` removes what is written
    for it."""
    file = None if arguments.program else _trainer_file(arguments)
    if not (arguments.program or file or arguments.hf):
        return None
    kind = gpus.gpu(arguments.gpu or gpus.DEFAULT)
    common = {"assumed": assumed(arguments.assume or ()), "shows": arguments.show_output}
    own = {**common, "ranks": ranks, "rows": arguments.rows, "length": arguments.seq_len}
    if arguments.program:
        for name in ("hf", "trainer", "method", "accelerate"):
            if value := getattr(arguments, name):
                raise ConfigError(f"--{name}", str(value), "is not for a program", "Leave it out")
        if arguments.words:
            remedy = "Write what is for the program after its name"
            raise ConfigError("plan", arguments.words[0], "stands before a program", remedy)
        require_program(arguments.program)
        return AskedProgram(programs.Program(arguments.program, kind, **own), arguments.program)
    if file:
        require_config(model_of(file.model).folder)
        folder = Path(stack.enter_context(TemporaryDirectory()))
        words = file.words(folder)
        program = programs.Program(words, kind, made_up=True, title=file.title, **own)
        changes = [word for word in arguments.words if "=" in word]
        return AskedProgram(program, (str(file.path), *changes))
    model = model_of(arguments.hf)  # last, as the Hub may be asked
    return asked_trainer(arguments, model, kind, ranks or 1, **common)


def _trainer_file(arguments: argparse.Namespace) -> TrainerFile | None:
    """The file of another trainer that is to be planned, with its overrides; None if it is not one."""
    changes = [word for word in arguments.words if "=" in word]
    names = [word for word in arguments.words if word not in changes]
    names += [arguments.config] if arguments.config else []
    launch = arguments.accelerate
    file = None
    if len(names) == 1 and Path(names[0]).is_file():
        asked = arguments.trainer, arguments.seq_len, arguments.hf
        file = read_file(Path(names[0]), changes, launch, *asked)
    if launch and not file:
        reason = "goes with a file of another trainer"
        raise ConfigError("--accelerate", str(launch), reason, "Name that file first")
    if file and arguments.method:
        raise ConfigError("--method", arguments.method, "is for --hf", "The file says the method")
    return file


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
