"""From a torchtune config to settings that cannot be wrong.

``AdaptiveSettings.from_config`` reads the three places where this package adds keys:
``use_maximum_batch_size`` and ``batch_increase_function`` at top level, and the block
``adaptive_batching``. Inside the block every key is known and typed; an unknown one is an error, so a
misspelt setting is never silently its default.

``check_recipe_config`` looks at the keys that the recipes share with torchtune: what cannot work
together stops here, before any model is built.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError

log = logging.getLogger(__name__)

BLOCK = "adaptive_batching"

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}

# --- readers: a raw value and its key in, a typed value or a ConfigError out ----------------------


def _boolean(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(key, value, "is not a boolean", "Use True or False")


def _whole_number(minimum: int) -> Callable[[str, object], int]:
    def read(key: str, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        raise ConfigError(
            key, value, f"is not a whole number of at least {minimum}", f"Use {minimum} or more"
        )

    return read


def _number(low: float, high: float, advice: str) -> Callable[[str, object], float]:
    def read(key: str, value: object) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and low <= float(value) < high:  # type: ignore[arg-type]
            return float(value)  # type: ignore[arg-type]
        raise ConfigError(key, value, f"is not a number from {low:g} to below {high:g}", advice)

    return read


def _one_of(*choices: str) -> Callable[[str, object], str]:
    def read(key: str, value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise ConfigError(key, value, "is not a choice", f"Use one of {', '.join(choices)}")

    return read


def _optional(read: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda key, value: None if value is None else read(key, value)


def amount_of_memory(key: str, value: object) -> int:
    """``24GiB``, ``512 MB`` or a plain number of bytes."""
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match and match[2] in _UNITS and (size := int(float(match[1]) * _UNITS[match[2]])) > 0:
            return size
    units = ", ".join(unit for unit in _UNITS if unit)
    raise ConfigError(
        key, value, "is not an amount of memory", f"Write it as 24GiB, or in bytes (units: {units})"
    )


def _cache(key: str, value: object) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return value
    raise ConfigError(
        key, value, "is neither a boolean nor a folder", "Use True, False, or a folder's path"
    )


def _rounding(key: str, value: object) -> str:
    # On torchtune's command line ``None`` becomes null, and whoever types it means "do not round".
    if value is None:
        return "none"
    return _one_of("power_of_two", "divisor", "none")(key, value)


def _gradient_noise(key: str, value: object) -> str:
    # YAML reads a bare ``off`` as False.
    if value is None or isinstance(value, bool):
        return "observe" if value else "off"
    return _one_of("off", "observe", "act")(key, value)


def _token_budget(key: str, value: object) -> bool | int:
    if value is None or isinstance(value, bool):
        return bool(value)
    return _whole_number(1)(key, value)


def _setting(default: Any, read: Callable[[str, object], Any]) -> Any:
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveSettings:
    """What the user asked for. Field by field, with its default:"""

    use_maximum_batch_size: bool = False
    """Search for the largest micro-batch that fits, then train with it."""

    grows: bool = False
    """Whether ``batch_increase_function`` or ``gradient_noise: act`` is set."""

    search: str = _setting("extrapolate", _one_of("extrapolate", "bisect", "halve", "predict"))
    """How to search. The first three find the same size; ``predict`` confirms a predicted one."""

    rounding: str = _setting("power_of_two", _rounding)
    """Which sizes may be found: powers of two, divisors of the rows per rank in a step, or any."""

    ceiling: int | None = _setting(None, _optional(_whole_number(1)))
    """Never go above this micro-batch (the data bound it as well: one step per epoch must remain)."""

    headroom: float = _setting(0.05, _number(0, 1, "Use the share of memory to keep free, as 0.05"))
    """The share of memory that a trial must leave free."""

    memory_limit: int | None = _setting(None, _optional(amount_of_memory))
    """Behave as a device with this much memory; on CPU, simulate one."""

    probe_length: int | None = _setting(None, _optional(_whole_number(2)))
    """Row length of the trials, in tokens; by default the longest row that the data can produce."""

    keep_global_batch: bool = _setting(False, _boolean)
    """Keep micro-batch x accumulation x ranks exactly as configured; only the split changes."""

    cache: bool | str = _setting(True, _cache)
    """Remember found sizes: in the user's cache folder (True), in a folder of your own, or not."""

    grow_past_memory: bool = _setting(False, _boolean)
    """Let the global batch grow by accumulation once the micro-batch is the largest that fits."""

    lr_scaling: str | None = _setting(None, _optional(_one_of("none", "sqrt", "linear", "gain")))
    """What a grown batch does to the learning rate; by default what the schedule is meant for."""

    token_budget: bool | int = _setting(False, _token_budget)
    """Make micro-batches by tokens, not rows: find how many fit at each row length (True), or the most
    tokens of a micro-batch with its padding. The rows in a step stay as configured."""

    beta2: str = _setting("fixed", _one_of("fixed", "half_life"))
    """Adam's second beta: as configured, or forgetting over as many samples as it did at the start."""

    gradient_noise: str = _setting("off", _gradient_noise)
    """Measure the gradient noise scale: ``observe`` logs it, ``act`` lets the batch grow by it."""

    workers: int = _setting(0, _whole_number(0))
    """Processes on each rank that fetch and collate rows ahead."""

    on_out_of_memory: str = _setting("raise", _optional(_one_of("shrink", "raise")))
    """What training does when memory runs out: take the step again with smaller micro-batches, or stop. By
    default it shrinks where ``use_maximum_batch_size`` is on and the optimizer does not step in backward."""

    grow_back_after: int | None = _setting(100, _optional(_whole_number(1)))
    """Steps without trouble after which a micro-batch that failed in training is tried again; null: never."""

    rank_timeout: float = _setting(45.0, _number(1, 86400, "Use a number of seconds, as 45"))
    """Seconds after which a rank that gives no sign of life, or hangs in the search, is given up, and the
    run with it."""

    step_timeout: float = _setting(600.0, _number(1, 86400, "Use a number of seconds, as 600"))
    """The same for a rank that is alive, but stands still in a training step while others wait for it."""

    search_only: bool = _setting(False, _boolean)
    """Stop after the search (what ``tune-adaptive find`` sets)."""

    @property
    def shrinks(self) -> bool:
        """Whether a training step in which memory runs out is taken again."""
        return self.on_out_of_memory == "shrink"

    @property
    def budgets(self) -> bool:
        """Whether micro-batches are made by tokens."""
        return self.token_budget is not False

    @property
    def searches(self) -> bool:
        """Whether the largest micro-batch must be known."""
        return (self.use_maximum_batch_size or self.grows) and not self.budgets

    @property
    def predicts(self) -> bool:
        """Whether a search begins with a prediction."""
        return self.searches and self.search == "predict"

    @property
    def adapts(self) -> bool:
        """Whether a run decides about its batch at all, and goes on with its decisions on resume."""
        return self.use_maximum_batch_size or self.grows or self.budgets

    @property
    def survives(self) -> bool:
        """Whether ranks must stay together when memory runs out on one of them."""
        return self.adapts or self.shrinks

    def agreement_timeout(self, compiled: bool) -> float:
        """Seconds that ranks wait for each other to agree: long enough for the watchdog to speak first
        and, where models are compiled, for a rank that compiles while another has it cached."""
        return 3600.0 if compiled else 2 * max(self.rank_timeout, self.step_timeout)

    @classmethod
    def from_config(cls, cfg: DictConfig) -> AdaptiveSettings:
        """Read and check everything that this package adds to a torchtune config."""
        block = cfg.get(BLOCK)
        if block is None:
            block = {}
        elif not isinstance(block, DictConfig):
            raise ConfigError(
                BLOCK, block, "is not a block of settings", "Write `key: value` in it"
            )
        readers = {f.name: f.metadata["read"] for f in fields(cls) if f.metadata}
        for key in block:
            if key not in readers:
                raise ConfigError(
                    f"{BLOCK}.{key}", block[key], "is not a setting", _did_you_mean(key, readers)
                )
        values = {key: readers[key](f"{BLOCK}.{key}", block[key]) for key in block}
        switch = "use_maximum_batch_size"
        values[switch] = _boolean(switch, cfg.get(switch, False))
        acts = values.get("gradient_noise") == "act"
        values["grows"] = acts or cfg.get("batch_increase_function") is not None
        if values.get("on_out_of_memory") is None:
            budgets = values.get("token_budget", False) is not False
            adapts = values[switch] or values["grows"] or budgets
            can_redo = adapts and not cfg.get("optimizer_in_bwd", False)
            values["on_out_of_memory"] = "shrink" if can_redo else "raise"
        return cls(**values)


# --- the keys that the recipes share with torchtune ------------------------------------------------

_COMMON_KEYS = frozenset(
    [
        "output_dir",
        "log_every_n_steps",
        "log_peak_memory_stats",
        "metric_logger",
        "profiler",
        "device",
        "dtype",
        "seed",
        "cudnn_deterministic_mode",
        "model",
        "tokenizer",
        "checkpointer",
        "resume_from_checkpoint",
        "dataset",
        "shuffle",
        "batch_size",
        "collate_fn",
        "optimizer",
        "lr_scheduler",
        "loss",
        "epochs",
        "max_steps_per_epoch",
        "gradient_accumulation_steps",
        "clip_grad_norm",
        "compile",
        "enable_activation_checkpointing",
        "enable_activation_offloading",
        "custom_sharded_layers",
        "fsdp_cpu_offload",
        "fsdp_reshard_after_forward",
        "use_maximum_batch_size",
        "batch_increase_function",
        "adaptive_batching",
        "save_every_n_steps",
    ]
)
_RECIPE_KEYS = {
    "full": _COMMON_KEYS
    | {"optimizer_in_bwd", "ac_mode", "ac_option", "enable_async_checkpointing"}
    | {"tensor_parallel_dim", "tensor_parallel_plan"},
    "lora": _COMMON_KEYS | {"save_adapter_weights_only"},
}


def unused_keys(cfg: DictConfig, recipe: str) -> list[str]:
    """Top-level keys that the recipe would ignore; raises if one looks like a misspelt key.

    A key that other values refer to (``${max_seq_len}``) is a variable and is never reported.
    """
    known = _RECIPE_KEYS[recipe]
    every_known = frozenset().union(*_RECIPE_KEYS.values())
    text = OmegaConf.to_yaml(cfg, resolve=False)
    unused = []
    for key in map(str, cfg):
        if key in known or re.search(r"\$\{" + re.escape(key) + r"[}.\[]", text):
            continue
        if key not in every_known and (close := get_close_matches(key, known, n=1, cutoff=0.87)):
            raise ConfigError(
                key,
                _plain(cfg, key),
                f"is not a key of this recipe, and looks like {close[0]}",
                f"Write {close[0]}, or remove it (~{key} on the command line)",
            )
        unused.append(key)
    return unused


def check(cfg: DictConfig, recipe: str) -> AdaptiveSettings:
    """Everything that can be wrong in a config and be seen before a model is built.

    Args:
        cfg: the whole config.
        recipe: the kind of recipe that it is for, ``full`` or ``lora``.
    """
    if ignored := unused_keys(cfg, recipe):
        log.warning(f"Not used by this recipe: {', '.join(ignored)}")
    settings = AdaptiveSettings.from_config(cfg)
    check_recipe_config(cfg, recipe)
    check_adaptive_config(cfg, settings)
    return settings


def check_recipe_config(cfg: DictConfig, recipe: str) -> None:
    """Stop at what cannot work in torchtune's own keys."""
    for key, minimum in (("batch_size", 1), ("gradient_accumulation_steps", 1), ("epochs", 0)):
        _whole_number(minimum)(key, cfg.get(key))
    _optional(_whole_number(1))("max_steps_per_epoch", cfg.get("max_steps_per_epoch"))
    _check_dtype(cfg)
    _check_activation_memory(cfg)
    _check_collate(cfg)
    if cfg.get("fsdp_cpu_offload", False) and cfg.device == "cpu":
        raise ConfigError(
            "fsdp_cpu_offload",
            True,
            "moves parameters between an accelerator and the CPU, and device is cpu",
            "Set fsdp_cpu_offload=False, or train on an accelerator",
        )
    if recipe == "full":
        _check_optimizer_in_backward(cfg)
        _check_tensor_parallel(cfg)
    elif cfg.get("optimizer_in_bwd", False):
        raise ConfigError(
            "optimizer_in_bwd",
            True,
            "is not available in the LoRA recipe",
            "Remove it: adapters have little optimizer state to save",
        )


def check_adaptive_config(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """Stop at what cannot work together with adaptive batching."""
    _check_growth(cfg, settings)
    if settings.search_only and not settings.use_maximum_batch_size:
        raise ConfigError(
            f"{BLOCK}.search_only",
            True,
            "has nothing to search for",
            "Set use_maximum_batch_size=True as well",
        )
    if settings.shrinks and cfg.get("optimizer_in_bwd", False):
        raise ConfigError(
            f"{BLOCK}.on_out_of_memory",
            "shrink",
            "takes a step again, and with optimizer_in_bwd a step has changed parameters before it is over",
            "Set it to raise, or set optimizer_in_bwd=False",
        )
    if settings.survives and cfg.get("tensor_parallel_dim", 1) > 1:
        raise ConfigError(
            "tensor_parallel_dim",
            cfg.tensor_parallel_dim,
            "cannot be combined with use_maximum_batch_size, growth or shrink: a rank that runs out of "
            "memory finishes the step's collectives in the others' place, and can do so for FSDP's only",
            "Set tensor_parallel_dim=1, or use_maximum_batch_size=False, batch_increase_function=null, "
            f"{BLOCK}.on_out_of_memory=raise, and choose batch_size yourself",
        )
    if not settings.use_maximum_batch_size:
        return
    if settings.keep_global_batch and cfg.get("optimizer_in_bwd", False):
        raise ConfigError(
            f"{BLOCK}.keep_global_batch",
            True,
            "needs gradient accumulation, and with optimizer_in_bwd there is none",
            "Set one of the two to False",
        )


def _check_growth(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    in_backward = cfg.get("optimizer_in_bwd", False)
    if settings.budgets and in_backward:
        raise ConfigError(
            f"{BLOCK}.token_budget",
            settings.token_budget,
            "makes several micro-batches of a step, and with optimizer_in_bwd there can be one only",
            "Set it to False, or set optimizer_in_bwd=False",
        )
    if settings.budgets and settings.use_maximum_batch_size:
        raise ConfigError(
            f"{BLOCK}.token_budget",
            settings.token_budget,
            "fills the memory without changing the rows in a step, and use_maximum_batch_size changes them",
            "Set one of the two to False",
        )
    if settings.grow_past_memory and in_backward:
        raise ConfigError(
            f"{BLOCK}.grow_past_memory",
            True,
            "needs gradient accumulation, and with optimizer_in_bwd there is none",
            "Set one of the two to False",
        )
    if settings.gradient_noise != "off" and in_backward:
        raise ConfigError(
            f"{BLOCK}.gradient_noise",
            settings.gradient_noise,
            "needs the gradients of a whole step, and with optimizer_in_bwd they never exist together",
            "Set it to off, or set optimizer_in_bwd=False",
        )
    if settings.gradient_noise == "act" and cfg.get("batch_increase_function") is not None:
        raise ConfigError(
            f"{BLOCK}.gradient_noise",
            "act",
            "decides about the batch, and so does batch_increase_function",
            "Set it to observe, or batch_increase_function=null",
        )
    if settings.lr_scaling == "gain" and settings.gradient_noise == "off":
        raise ConfigError(
            f"{BLOCK}.lr_scaling",
            "gain",
            "is computed from the gradient noise scale, which is not measured",
            f"Set {BLOCK}.gradient_noise=observe, or another rule",
        )
    if settings.beta2 == "half_life" and not re.search(
        r"^torch\.optim\.Adam(W)?$", cfg.optimizer.get("_component_", "")
    ):
        raise ConfigError(
            f"{BLOCK}.beta2",
            "half_life",
            "corrects the second moment of torch's Adam, which the optimizer is not "
            f"({cfg.optimizer.get('_component_')})",
            "Use torch.optim.AdamW or torch.optim.Adam, or set it to fixed",
        )
    steps = cfg.get("save_every_n_steps")
    _optional(_whole_number(1))("save_every_n_steps", steps)
    if steps is not None and cfg.get("enable_async_checkpointing", False):
        raise ConfigError(
            "save_every_n_steps",
            steps,
            "cannot be asynchronous: torchtune finds asynchronous checkpoints by their epoch",
            "Set enable_async_checkpointing=False, or save_every_n_steps=null",
        )


def _check_dtype(cfg: DictConfig) -> None:
    if cfg.dtype not in ("bf16", "fp32", "fp64"):
        raise ConfigError(
            "dtype",
            cfg.dtype,
            "cannot be trained in: fp16 needs loss scaling, which these recipes do not have",
            "Use bf16 or fp32",
        )


def _check_activation_memory(cfg: DictConfig) -> None:
    if not cfg.get("enable_activation_offloading", False):
        return
    if cfg.device != "cuda":
        raise ConfigError(
            "enable_activation_offloading",
            True,
            f"needs a CUDA device, and device is {cfg.device}",
            "Set enable_activation_offloading=False",
        )
    if not cfg.get("enable_activation_checkpointing", False):
        raise ConfigError(
            "enable_activation_offloading",
            True,
            "works only together with activation checkpointing",
            "Set enable_activation_checkpointing=True as well",
        )


def _check_collate(cfg: DictConfig) -> None:
    if "left_pad_sequence" in (cfg.get("collate_fn") or ""):
        raise ConfigError(
            "collate_fn",
            cfg.collate_fn,
            "pads on the left, which is for generation only",
            "Use torchtune.data.padded_collate_sft",
        )


def _check_optimizer_in_backward(cfg: DictConfig) -> None:
    if not cfg.get("optimizer_in_bwd", False):
        return
    if cfg.get("clip_grad_norm") is not None:
        raise ConfigError(
            "clip_grad_norm",
            cfg.clip_grad_norm,
            "needs all gradients at once, and with optimizer_in_bwd they never exist together",
            "Set clip_grad_norm=None, or optimizer_in_bwd=False",
        )
    if cfg.gradient_accumulation_steps > 1:
        raise ConfigError(
            "gradient_accumulation_steps",
            cfg.gradient_accumulation_steps,
            "cannot accumulate: with optimizer_in_bwd every backward pass is an optimizer step",
            "Set gradient_accumulation_steps=1, or optimizer_in_bwd=False",
        )


def _check_tensor_parallel(cfg: DictConfig) -> None:
    dim = cfg.get("tensor_parallel_dim", 1)
    _whole_number(1)("tensor_parallel_dim", dim)
    if dim == 1:
        return
    if cfg.get("tensor_parallel_plan") is None:
        raise ConfigError(
            "tensor_parallel_dim",
            dim,
            "needs to know how to split the model",
            "Set tensor_parallel_plan, or tensor_parallel_dim=1",
        )
    if cfg.optimizer.get("fused", False):
        raise ConfigError(
            "optimizer.fused",
            True,
            "does not work with tensor parallelism",
            "Set optimizer.fused=False",
        )


def _did_you_mean(key: object, known: Iterable[str] | Mapping[str, object]) -> str:
    names = sorted(known)
    close = get_close_matches(str(key), names, n=1)
    return f"Did you mean {close[0]}?" if close else f"The settings are {', '.join(names)}"


def _plain(cfg: DictConfig, key: str) -> object:
    value = cfg[key]
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
