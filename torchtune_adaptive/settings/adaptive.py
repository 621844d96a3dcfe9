"""From a torchtune config to settings that cannot be wrong.

``AdaptiveSettings.from_config`` reads the three places where this package adds keys:
``use_maximum_batch_size`` and ``batch_increase_function`` at top level, and the block
``adaptive_batching``. Inside the block every key is known and typed; an unknown one is an error, so a
misspelt setting is never silently its default.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.errors import ConfigError

log = logging.getLogger(__name__)
BLOCK = "adaptive_batching"

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}


def _boolean(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(key, value, "is not a boolean", "Use True or False")


def whole_number(minimum: int) -> Callable[[str, object], int]:
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


def optional(read: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
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
    return whole_number(1)(key, value)


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

    ceiling: int | None = _setting(None, optional(whole_number(1)))
    """Never go above this micro-batch (the data bound it as well: one step per epoch must remain)."""

    headroom: float = _setting(0.05, _number(0, 1, "Use the share of memory to keep free, as 0.05"))
    """The share of memory that a trial must leave free."""

    memory_limit: int | None = _setting(None, optional(amount_of_memory))
    """Behave as a device with this much memory; on CPU, simulate one."""

    probe_length: int | None = _setting(None, optional(whole_number(2)))
    """Row length of the trials, in tokens; by default the longest row that the data can produce."""

    keep_global_batch: bool = _setting(False, _boolean)
    """Keep micro-batch x accumulation x ranks exactly as configured; only the split changes."""

    cache: bool | str = _setting(True, _cache)
    """Remember found sizes: in the user's cache folder (True), in a folder of your own, or not."""

    grow_past_memory: bool = _setting(False, _boolean)
    """Let the global batch grow by accumulation once the micro-batch is the largest that fits."""

    lr_scaling: str | None = _setting(None, optional(_one_of("none", "sqrt", "linear", "gain")))
    """What a grown batch does to the learning rate; by default what the schedule is meant for."""

    token_budget: bool | int = _setting(False, _token_budget)
    """Make micro-batches by tokens, not rows: find how many fit at each row length (True), or the most
    tokens of a micro-batch with its padding. The rows in a step stay as configured."""

    beta2: str = _setting("fixed", _one_of("fixed", "half_life"))
    """Adam's second beta: as configured, or forgetting over as many samples as it did at the start."""

    gradient_noise: str = _setting("off", _gradient_noise)
    """Measure the gradient noise scale: ``observe`` logs it, ``act`` lets the batch grow by it."""

    workers: int = _setting(0, whole_number(0))
    """Processes on each rank that fetch and collate rows ahead."""

    on_out_of_memory: str = _setting("raise", optional(_one_of("shrink", "raise")))
    """What training does when memory runs out: take the step again with smaller micro-batches, or stop. By
    default it shrinks where ``use_maximum_batch_size`` is on and the optimizer does not step in backward."""

    grow_back_after: int | None = _setting(100, optional(whole_number(1)))
    """Steps without trouble after which a micro-batch that failed in training is tried again; null: never."""

    rank_timeout: float = _setting(45.0, _number(1, 86400, "Use a number of seconds, as 45"))
    """Seconds after which a rank that gives no sign of life, or hangs in the search, is given up, and the
    run with it."""

    step_timeout: float = _setting(600.0, _number(1, 86400, "Use a number of seconds, as 600"))
    """The same for a rank that is alive, but stands still in a training step while others wait for it."""

    stop_timeout: float = _setting(300.0, _number(1, 86400, "Use a number of seconds, as 300"))
    """Seconds in which training must have saved a checkpoint and ended after SIGTERM or Ctrl-C; then it ends
    without."""

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


def _did_you_mean(key: object, known: Iterable[str] | Mapping[str, object]) -> str:
    names = sorted(known)
    close = get_close_matches(str(key), names, n=1)
    return f"Did you mean {close[0]}?" if close else f"The settings are {', '.join(names)}"
