"""The request for a prediction: the config, the device, the length of rows, and the assumptions."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner import DeviceLimits, Machine, Pace, gpus
from torchtune_adaptive.recipe.data.few_lengths import FewLengths
from torchtune_adaptive.recipe.data.length_files import longest_known
from torchtune_adaptive.recipe.plan.device import device_for, pace_for
from torchtune_adaptive.recipe.plan.query import Query, planned_rank
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.checks import check, require_torchvision
from torchtune_adaptive.recipe.settings.keys import CONTEXT, TENSORS
from torchtune_adaptive.recipe.settings.kind_table import kind_of

ASSUMED_LENGTH = 2048
ASSUMED_PROMPT = 512


@dataclass(frozen=True)
class PlanRequest:
    """A run that is to be predicted, and the assumptions about it."""

    name: str
    """Name of the config."""
    asked: Asked
    ranks: int
    device: DeviceLimits
    length: int
    length_source: str
    assumptions: tuple[str, ...]
    pace: Pace | None
    """Pace that its speed follows from; None if that is not known."""
    machine: Machine
    """What is told about the machine."""
    gpu: str
    """Name of its GPU, ours or torch's; of something else if only its memory is known."""

    @property
    def cfg(self) -> DictConfig:
        return self.asked.cfg

    def query(self, **changes: Any) -> Query:
        query = Query(
            self.asked.resolved(),
            self.ranks,
            self.device,
            self.length,
            rank=planned_rank(self.asked),
            pace=self._pace(),
        )
        return replace(query, **changes)

    def _pace(self) -> Pace | None:
        """The pace of this config on these ranks, which may be others than those that were asked for."""
        if self.pace is None:
            return None
        compiled, quantized = bool(self.asked["compile"]), self.asked.quantized
        measured = self.pace.correction if compiled == self.pace.compiled else None
        return replace(
            self.pace,
            ranks=self.ranks,
            compiled=compiled,
            quantized=quantized,
            correction=measured,
            holders=self.asked.holders,
        )


def on_devices(plan: PlanRequest, names: str) -> list[tuple[DeviceLimits, Pace | None]]:
    """The devices of ``--compare``, as a plan needs to know them."""
    found = []
    for name in names.split(","):
        device, _ = device_for(plan.asked, plan.ranks, name.strip())
        same = device.name == plan.device.name
        machine = plan.machine if same else plan.machine.for_other_gpus
        pace, _ = pace_for(plan.asked, plan.ranks, device.name, machine)
        found.append((device, pace))
    return found


def plan_request(
    cfg: DictConfig,
    ranks: int,
    gpu_name: str | None = None,
    memory: int | None = None,
    length: int | None = None,
    name: str = "config",
    machine: Machine | None = None,
) -> PlanRequest:
    """Settle what the prediction is for.

    Args:
        cfg: the config of the run.
        ranks: the number of ranks.
        gpu_name: the name of a known GPU, or ``here``.
        memory: the capacity of one process, if known.
        length: the tokens in a row, as many as the longest sample has, if known.
        name: the name of the config, for the report.
        machine: what is told about the machine, if anything is.

    Raises:
        ConfigError: the config cannot work.
        NoPrediction: its memory cannot be predicted.
    """
    cfg, stand_in = _with_installed_optimizer(cfg)
    asked = check(cfg, kind_of(cfg))
    require_traceable(asked)
    _require_installed(cfg)
    require_torchvision(cfg)
    source = "--seq-len"
    if length is None:
        length, source = row_length(asked)
    if asked.kind.generates:
        source = f"prompts of {length}: {source}; responses of max_generated_tokens"
        length += asked["max_generated_tokens"]
    if (lengths := FewLengths.of(asked)) and (padded := lengths.padded(length)) > length:
        length, source = padded, f"{source}, rounded up as {TENSORS} has it"
    device, assumed = device_for(asked, ranks, gpu_name, memory)
    # Not the name of the device, which says how much memory it has, where that is limited.
    named = device.name if gpu_name in (None, gpus.HERE) else gpus.gpu(gpu_name).name
    machine = machine or Machine()
    pace, about_speed = pace_for(asked, ranks, named, machine)
    about = (*assumed, *stand_in, *_caveats(asked, device), *about_speed)
    return PlanRequest(name, asked, ranks, device, length, source, about, pace, machine, named)


def require_traceable(asked: Asked) -> None:
    """Check that one process can stand for one rank of a run.

    Raises:
        NoPrediction: it cannot.
    """
    if asked.holders > 1 and asked["compile"]:
        raise NoPrediction(
            f"compile: with {TENSORS}, compiled code launches collectives that cannot be traced. Set "
            "compile=False to get a prediction."
        )
    if asked.contexts > 1:
        raise NoPrediction(
            f"{CONTEXT}: attention over parts of rows cannot be traced without the other ranks. Search on "
            f"the ranks themselves (use_maximum_batch_size=True), or set {CONTEXT}=1 to get a prediction."
        )


_OF_ADAM = ("_component_", "lr", "betas", "eps", "weight_decay")


def _with_installed_optimizer(cfg: DictConfig) -> tuple[DictConfig, tuple[str, ...]]:
    """The config with an optimizer that can be traced in place of bitsandbytes' Adam, whose state is as large
    but whose kernels only run on a GPU; and what to say about it."""
    component = str(OmegaConf.select(cfg, "optimizer._component_"))
    if not component.startswith("bitsandbytes.") or "Adam" not in component:
        return cfg, ()
    instead = "torchao.optim.AdamW8bit" if "8bit" in component else "torch.optim.AdamW"
    changed = cfg.copy()
    given = {key: value for key, value in cfg.optimizer.items() if key in _OF_ADAM}
    changed.optimizer = {**given, "_component_": instead}
    about = f"optimizer: {component} is planned as {instead}, whose state is as large"
    if "Paged" in component:
        about += "; pages that move to the host are counted on the device (overestimates)"
    return changed, (about,)


def _require_installed(cfg: DictConfig) -> None:
    for part in ("model", "loss", "optimizer"):
        component = str(OmegaConf.select(cfg, f"{part}._component_") or "torch.")
        package = component.split(".")[0]
        if package in sys.modules or PathFinder.find_spec(package, [*sys.path, os.getcwd()]):
            continue
        remedy = "Install it"
        if part == "optimizer":
            remedy += (
                ", or plan with optimizer._component_=torchao.optim.AdamW8bit (similar size) or "
                "torch.optim.AdamW (more memory)"
            )
        missing = f"{package} is not installed, so {component} cannot be planned"
        raise NoPrediction(f"{missing}. {remedy}.")


def row_length(asked: Asked) -> tuple[int, str]:
    """The length of the longest rows as far as the config gives it, and where it does. Where rows are
    generated, it is that of the longest prompts."""
    cfg, settings = asked.cfg, asked.settings
    if settings.probe_length is not None:
        return settings.probe_length, f"{BLOCK}.probe_length"
    for block in ("dataset", "tokenizer"):
        if length := _max_seq_len(cfg.get(block)):
            return length, f"{block}.max_seq_len"
    if known := longest_known(cfg, settings.cache):
        return known, "the longest that an earlier run found in the data"
    longest = (cfg.get("model") or cfg.policy_model).get("max_seq_len") or ASSUMED_LENGTH
    assumed = min(ASSUMED_LENGTH, longest)
    if asked.kind.generates:
        assumed = min(ASSUMED_PROMPT, max(2, longest - asked["max_generated_tokens"]))
    return assumed, "assumed: give --seq-len or tokenizer.max_seq_len"


def _max_seq_len(block: Any) -> int | None:
    """The bound that a block of the config sets; a list of datasets sets one if each of them does."""
    nodes = block if isinstance(block, ListConfig) else [block]
    lengths = [node.get("max_seq_len") if isinstance(node, DictConfig) else None for node in nodes]
    set_lengths = [int(length) for length in lengths if length]
    return max(set_lengths) if len(set_lengths) == len(nodes) > 0 else None


def _caveats(asked: Asked, device: DeviceLimits) -> Iterator[str]:
    """The differences of the prediction from the run, and the direction of the error."""
    if asked["compile"]:
        if asked.compiled_for_gpu:
            yield "compile: compiling itself may take more for a moment (underestimates)"
        else:
            yield "compile: the simulated device runs everything as it is written"
    if (together := asked.holders) > 1:
        yield (
            f"{TENSORS}: {together} ranks have the same rows, so batch_size is that of all {together}, and a "
            "step trains on so many fewer rows"
        )
    if asked["fsdp_cpu_offload"]:
        yield "CPU offload: host memory is not predicted"
    if asked.settings.budgets:
        yield "token budget: micro-batches are of the longest rows; a budget has more of shorter ones"
    if asked.images:
        yield (
            "images: one for each row, of as many tiles as the model takes (underestimates if rows have more "
            "images, overestimates if they are small)"
        )
    if asked.packed():
        counted = "as flash attention (overestimates)"
        if asked.compiled_for_gpu:
            counted = "as it is compiled"
        yield (
            f"packed rows: flex attention is counted {counted}, but not what making its mask takes for a "
            "moment, 2 bytes x rows x length^2 (underestimates for very long rows)"
        )
    if asked.kind.generates:
        yield (
            "rollouts: every response has max_generated_tokens; rewards, and what else the host does between "
            "phases, take no time"
        )
    if asked["device"] != "cpu" and not device.before_ampere:
        yield "attention: flash; if torch selects cuDNN, its workspace is not included (underestimates)"
