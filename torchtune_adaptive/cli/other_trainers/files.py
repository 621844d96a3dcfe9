"""Which trainer a YAML file is of, and the command that trains what it says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from torchtune_adaptive.common import ConfigError, load_yaml

_OPTION = "a trainer's file"
_TRL = "TRL"


@dataclass(frozen=True)
class OtherTrainer:
    """A trainer whose files are planned."""

    package: str
    model: str
    """The key of the model."""
    marks: frozenset[str]
    """Keys of which a file of this trainer has at least one, and those of others have none."""
    program: tuple[str, ...]
    """What trains, before the file's path."""
    length: str
    """The key of the longest row."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRAINERS = {
    "Axolotl": OtherTrainer(
        "axolotl",
        "base_model",
        _names("micro_batch_size sequence_len adapter datasets num_epochs optimizer"),
        ("-m", "axolotl.cli.train"),
        "sequence_len",
    ),
    "LLaMA-Factory": OtherTrainer(
        "llamafactory",
        "model_name_or_path",
        _names(
            "stage finetuning_type cutoff_len template lora_target lora_rank dataset dataset_dir"
        ),
        ("-m", "llamafactory.cli", "train"),
        "cutoff_len",
    ),
    _TRL: OtherTrainer(
        "trl",
        "model_name_or_path",
        _names(
            "dataset_name datasets use_peft lora_r lora_target_modules dtype attn_implementation "
            "load_in_4bit load_in_8bit packing_strategy completion_only_loss dataset_text_field beta "
            "precompute_ref_log_probs num_generations max_completion_length reward_funcs use_vllm"
        ),
        ("-m", "torchtune_adaptive.cli.other_trainers.trl"),
        "max_length",
    ),
}
_OF_LLAMA_FACTORY_1 = _names("model_class train_dataset peft_config dist_config kernel_config")
"""Keys of the files of LLaMA-Factory's version 1, which are other ones."""
_OF_ACCELERATE = _names("distributed_type compute_environment")


@dataclass(frozen=True)
class TrainerFile:
    """A trainer's file, as it is planned."""

    path: Path
    name: str
    """The name of the trainer."""
    given: Mapping[str, Any]
    """What it has, with what is changed."""
    changed: bool
    launch: Path | None
    """The accelerate configuration that goes with it."""
    asked: str | None
    """The name of TRL's trainer, which a file of TRL does not say."""

    @property
    def model(self) -> str:
        return str(self.given[TRAINERS[self.name].model])

    @property
    def title(self) -> str:
        return f"{self.path.name} ({self.name})"

    def words(self, folder: Path) -> tuple[str, ...]:
        """The command; a changed file is written into a folder.

        Raises:
            ConfigError: the trainer is not installed.
        """
        trainer, path = TRAINERS[self.name], self.path
        if find_spec(trainer.package) is None:
            reason = f"is of {self.name}, which is not installed, and its own program is run"
            raise ConfigError(_OPTION, str(path), reason, f"pip install {trainer.package}")
        if self.changed:
            path = folder / path.name
            path.write_text(yaml.safe_dump(dict(self.given), sort_keys=False))
        launch = [str(self.launch)] if self.launch else []
        if self.name == _TRL:  # which launches by itself
            option = ["--accelerate_config", *launch] if launch else []
            return (*trainer.program, str(path), self.asked or "", *option)
        launcher = ["accelerate", "launch", "--config_file", *launch] if launch else []
        return (*launcher, *trainer.program, str(path))


def read_file(
    path: Path,
    changes: Sequence[str] = (),
    launch: Path | None = None,
    asked: str | None = None,
    length: int | None = None,
    model: str | None = None,
) -> TrainerFile | None:
    """Read a trainer's file; None if it is of none, or of torchtune.

    Args:
        path: of the file.
        changes: ``key=value`` in place of what the file has.
        launch: an accelerate configuration to go with it.
        asked: the name of TRL's trainer.
        length: of the rows, in place of the one that the file has.
        model: a name or a folder, in place of the one that the file has.

    Raises:
        ConfigError: the file cannot be read, it cannot be told whose it is, or a change makes no sense.
    """
    given = _loaded(path)
    name = None if given is None else recognized(given, path)
    if given is None or name is None:
        return None
    if asked and name != _TRL:
        raise ConfigError("--trainer", asked, f"is not of a file of {name}", "Leave it out")
    for change in changes:
        _apply(given, change)
    before = dict(given)
    if length is not None and name != _TRL:  # some of whose trainers have no such key
        given[TRAINERS[name].length] = length
    if model is not None:
        given[TRAINERS[name].model] = model
    if not isinstance(model := given[TRAINERS[name].model], str):
        reason, remedy = "is not the name of a model", "Write its name or its folder"
        raise ConfigError(TRAINERS[name].model, model, reason, remedy)
    if launch is not None:
        _require_launch(launch)
    return TrainerFile(path, name, given, bool(changes) or given != before, launch, asked)


def recognized(given: Mapping[str, Any], path: Path) -> str | None:
    """The name of the trainer whose file has these keys; None if no other trainer than torchtune has them.

    Raises:
        ConfigError: it is accelerate's, or may be of several trainers.
    """
    if _has_component(given):
        return None
    if not any(trainer.model in given for trainer in TRAINERS.values()):
        if _OF_ACCELERATE & set(given):
            reason = "is an accelerate configuration, which does not say what is trained"
            raise ConfigError(
                _OPTION, str(path), reason, f"Plan the trainer's file, with --accelerate {path}"
            )
        if "model" in given and (keys := sorted(_OF_LLAMA_FACTORY_1 & set(given))):
            reason = f"has {', '.join(keys)}, as files of LLaMA-Factory's version 1, which is not planned"
            remedy = "Write the keys of version 0, e.g. model_name_or_path and finetuning_type"
            raise ConfigError(_OPTION, str(path), reason, remedy)
        return None
    found = {
        name: sorted(trainer.marks & set(given))
        for name, trainer in TRAINERS.items()
        if trainer.model in given and trainer.marks & set(given)
    }
    if len(found) == 1:
        return next(iter(found))
    if found:
        both = "; ".join(f"{name} has {', '.join(keys)}" for name, keys in found.items())
        raise ConfigError(
            _OPTION, str(path), f"has keys of several trainers ({both})", "Keep those of one"
        )
    looked = "; ".join(
        f"{name}: {trainer.model} and one of {', '.join(sorted(trainer.marks))}"
        for name, trainer in TRAINERS.items()
    )
    raise ConfigError(
        _OPTION, str(path), "may be of several trainers, or of none", f"Looked for, {looked}"
    )


def _loaded(path: Path, option: str = "CONFIG") -> dict[str, Any] | None:
    """What a file has; None if it is no mapping, which is for others to complain about."""
    try:
        given = load_yaml(option, path)
    except ConfigError:
        with suppress(OSError):
            if "_component_" in path.read_text(errors="replace"):
                return None  # torchtune's, whose reader takes more
        raise
    return {str(key): value for key, value in given.items()} if isinstance(given, dict) else None


def _require_launch(path: Path) -> None:
    given = _loaded(path, "--accelerate")
    if given is None or not _OF_ACCELERATE & set(given):
        reason = "is not an accelerate configuration that can be read"
        remedy = (
            f"It has one of {', '.join(sorted(_OF_ACCELERATE))}; `accelerate config` writes one"
        )
        raise ConfigError("--accelerate", str(path), reason, remedy)


def _apply(given: dict[str, Any], change: str) -> None:
    """Change a key, which may be one inside of a block: ``fsdp_config.version=2``."""
    key, equals, value = change.partition("=")
    if not equals:
        raise ConfigError("KEY=VALUE", change, "is not an override", "Write key=value")
    *blocks, last = key.split(".")
    block = given
    for name in blocks:
        inner = block.get(name)
        block[name] = dict(inner) if isinstance(inner, Mapping) else {}
        block = block[name]
    try:
        block[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(key, value, f"is not YAML ({error})", "Write key=value") from None


def _has_component(value: Any) -> bool:
    """Whether a value has ``_component_`` anywhere, as torchtune's configs have."""
    if isinstance(value, Mapping):
        return "_component_" in value or _any(value.values())
    return isinstance(value, list) and _any(value)


def _any(values: Iterable[Any]) -> bool:
    return any(map(_has_component, values))
