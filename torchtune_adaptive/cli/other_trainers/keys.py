"""The kinds of keys that a trainer's file has, and how a table of them reads a file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

LINEAR_LAYERS = "linear-layers"
"""What stands for the names of all linear layers where trainers list them."""
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
"""The ways to compute experts that can be planned."""


@dataclass(frozen=True)
class Sets:
    """A key that is a setting of the planned step."""

    setting: str
    default: Any
    values: Mapping[Any, Any] | None = None
    """What a value becomes, of those that can be planned; by default it stays as it is."""
    why: str = "is not planned"
    """Why other values are refused."""
    null: str = ""
    """Why ``null`` is refused, if it is another thing than the default."""

    def becomes(self) -> str:
        """What it is in the plan, for people."""
        changed = [pair for pair in (self.values or {}).items() if pair[0] != pair[1]]
        if not changed:
            return self.setting
        words = ", ".join(f"{_yaml(given)}: {_yaml(planned)}" for given, planned in changed)
        return f"{self.setting} ({words})"


@dataclass(frozen=True)
class Joint:
    """A key that decides settings together with others, as the trainer's ``together`` says."""

    text: str
    """What it is in the plan, for people."""
    default: Any = None
    values: Iterable[Any] | None = None
    """The values that can be planned; by default, ``together`` looks at them."""
    why: str = "is not planned"

    def becomes(self) -> str:
        """What it is in the plan, for people."""
        return self.text


@dataclass(frozen=True)
class Refused:
    """A key that memory depends on and the planned step cannot have, unless it is off."""

    reason: str
    remedy: str = ""
    """By default, how to plan without it."""
    off: tuple[Any, ...] = (None, False)


Key = Sets | Joint | Refused
Keys = Mapping[str, Key]


@dataclass
class FileReading:
    """What a file became."""

    settings: dict[str, Any] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the plan takes for granted about the file."""
    not_read: list[str] = field(default_factory=list)
    """Keys on which no memory depends."""
    unknown: list[str] = field(default_factory=list)
    """Keys that the table does not have."""
    change: str = "add {}={}"
    """How a person changes a key: on the command line, or in the file."""

    def refuse(self, key: str, value: Any, reason: str, remedy: str) -> None:
        """Note that a key cannot be planned."""
        self.refusals.append(f"{key}: {_yaml(value)} {reason}. {remedy}.")

    def to_change(self, key: str, value: Any) -> str:
        """What to do for another value of a key, for people."""
        return self.change.format(key, _yaml(value))

    def read(
        self, given: Mapping[str, Any], keys: Keys, ignored: Iterable[str], prefix: str = ""
    ) -> dict[str, Any]:
        """Read what a file has by a table; returns the values of all keys of the table that are not refused,
        with their defaults. ``null`` is the default, as it is for most keys of these trainers."""
        for key in given:
            if key not in keys:
                (self.not_read if key in ignored else self.unknown).append(f"{prefix}{key}")
        values = {}
        for key, kind in keys.items():
            value = given.get(key)
            if isinstance(kind, Refused):
                if not any(value is off or value == off for off in kind.off):
                    without = f"To plan without it, {self.to_change(prefix + key, kind.off[-1])}"
                    self.refuse(prefix + key, value, kind.reason, kind.remedy or without)
                continue
            if value is None and key in given and isinstance(kind, Sets) and kind.null:
                self.refuse(prefix + key, value, kind.null, f"Write a value, e.g. {kind.default}")
            values[key] = value = kind.default if value is None else value
            if complaint := _complaint(kind, value):
                self.refuse(prefix + key, value, *complaint)
            elif isinstance(kind, Sets):
                self.settings[kind.setting] = _setting(kind, value)
        return values


@dataclass(frozen=True)
class Trainer:
    """A trainer whose files are read."""

    name: str
    checked: str
    """What the table was read from."""
    keys: Keys
    ignored: frozenset[str]
    together: Callable[[Mapping[str, Any], FileReading], None]
    """Adds the settings that several keys decide, from the values of all keys."""
    model: str = "model_name_or_path"
    rows: str = "per_device_train_batch_size"
    length: str = "max_length"
    accumulation: str = "gradient_accumulation_steps"
    checkpointing: tuple[str, Any] = ("gradient_checkpointing", True)
    """The key and the value that switch checkpointing on."""
    adapters: tuple[str, Any] = ("use_peft", True)
    """The key and the value that train adapters."""

    def read(self, given: Mapping[str, Any]) -> FileReading:
        """What a file becomes; whatever cannot be planned is among its refusals."""
        reading = FileReading()
        values = reading.read(given, self.keys, self.ignored)
        self.together(values, reading)
        return reading

    def known(self) -> set[str]:
        """All keys of the table."""
        return {*self.keys, *self.ignored}

    def nearest(self, key: str) -> str | None:
        """The known key that an unknown one may be a misspelling of."""
        return next(iter(difflib.get_close_matches(key, self.known(), 1, 0.75)), None)


def target_modules(key: str, given: Any, reading: FileReading) -> str | list[str] | None:
    """The linear layers that get adapters; a pattern is refused."""
    if given in ("all", "all-linear", ["all"], ["all-linear"]):
        return "all-linear"
    listed = given.split(",") if isinstance(given, str) else given
    if not isinstance(listed, list):
        reading.refuse(key, given, "is no list of names", f"Write one, e.g. {key}=[q_proj,v_proj]")
        return None
    paths = [str(name).strip() for name in listed]
    if not all(path.replace(".", "").replace("_", "").isalnum() for path in paths):
        reason = "is a pattern, and a plan takes names of layers"
        reading.refuse(key, given, reason, f"Write a list of names, e.g. {key}=[q_proj,v_proj]")
        return None
    return [path.rpartition(".")[2] for path in paths]


def names(text: str) -> frozenset[str]:
    """The names of a text."""
    return frozenset(text.split())


def _complaint(kind: Sets | Joint, value: Any) -> tuple[str, str] | None:
    """Why a value is refused and what to do, or None."""
    if kind.values is not None:
        allowed = list(kind.values)
        hashable = isinstance(value, (str, int, float, bool, type(None)))
        if hashable and any(value == one and type(value) is type(one) for one in allowed):
            return None
        return kind.why, f"What can be planned: {', '.join(map(_yaml, allowed))}"
    default = kind.default
    if isinstance(default, bool):
        if not isinstance(value, bool):
            return "is neither true nor false", "Write one of the two"
    elif isinstance(default, int):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return "is not a whole number of 1 or more", f"Write one, e.g. {default}"
    elif isinstance(default, float):
        try:
            float(value)
        except (TypeError, ValueError):
            return "is not a number", f"Write one, e.g. {default}"
    return None


def _setting(kind: Sets, value: Any) -> Any:
    if kind.values is not None:
        return kind.values[value]
    return float(value) if isinstance(kind.default, float) else value


def _yaml(value: Any) -> str:
    """A value as YAML has it."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
