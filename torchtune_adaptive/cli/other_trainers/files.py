"""Which trainer a YAML file is of, and what it becomes: settings of the transformers step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchtune_adaptive.cli.other_trainers.accelerate import read_launch
from torchtune_adaptive.cli.other_trainers.axolotl import AXOLOTL
from torchtune_adaptive.cli.other_trainers.keys import FileReading, Trainer, names
from torchtune_adaptive.cli.other_trainers.llama_factory import LLAMA_FACTORY
from torchtune_adaptive.cli.other_trainers.trl import DPO, GENERATED, SFT
from torchtune_adaptive.cli.other_trainers.trl_rollouts import GRPO, RLOO
from torchtune_adaptive.common import ConfigError, NoPrediction, load_yaml

_OPTION = "a trainer's file"
_TRL = "TRL"
_MARKS = {
    AXOLOTL.name: (
        "base_model",
        names("micro_batch_size sequence_len adapter datasets num_epochs optimizer"),
    ),
    LLAMA_FACTORY.name: (
        "model_name_or_path",
        names(
            "stage finetuning_type cutoff_len template lora_target lora_rank dataset dataset_dir"
        ),
    ),
    _TRL: (
        "model_name_or_path",
        names(
            "dataset_name datasets use_peft lora_r lora_target_modules dtype attn_implementation "
            "load_in_4bit load_in_8bit packing_strategy completion_only_loss dataset_text_field beta "
            "precompute_ref_log_probs num_generations max_completion_length reward_funcs use_vllm"
        ),
    ),
}
"""For each trainer the key of its model, and keys of which a file of that trainer has at least one and those
of others have none."""
_OF_LLAMA_FACTORY_1 = names("model_class train_dataset peft_config dist_config kernel_config")
"""Keys of the files of LLaMA-Factory's version 1, which are other ones."""
_TRAINERS = {"SFTTrainer": SFT, "DPOTrainer": DPO, "GRPOTrainer": GRPO, "RLOOTrainer": RLOO}
"""TRL's, by the names of their classes."""
_OF_ACCELERATE = names("distributed_type compute_environment")


@dataclass(frozen=True)
class TrainerFile:
    """A trainer's file, as it is planned."""

    path: Path
    trainer: Trainer
    model: str
    """The name or the folder of the model."""
    settings: Mapping[str, Any]
    """Those of the transformers step, but for its folder and ranks."""
    ranks: int | None
    """The number of GPUs, if a file says it."""
    notes: tuple[str, ...]
    """What is taken for granted, and what is not read, for people."""


def read_file(
    path: Path,
    changes: Sequence[str] = (),
    launch: Path | None = None,
    asked: str | None = None,
    length: int | None = None,
) -> TrainerFile | None:
    """Read a trainer's file; None if it is of none, or of torchtune.

    Args:
        path: of the file.
        changes: ``key=value`` in place of what the file has.
        launch: an accelerate configuration to go with it.
        asked: the name of TRL's trainer, which a file of TRL does not say.
        length: of the rows, in place of the one that the file has.

    Raises:
        ConfigError: the file cannot be read, it cannot be told whose it is, or a change makes no sense.
        NoPrediction: a key that memory depends on cannot be planned.
    """
    given = _loaded(path)
    name = None if given is None else recognized(given, path)
    if given is None or name is None:
        return None
    trainer = _trainer(name, given, asked)
    for change in changes:
        _apply(given, change, trainer)
    if length is not None:
        given[trainer.length] = length
    reading = trainer.read(given)
    ranks = None
    if launch is not None:
        ranks = read_launch(_launch(launch), reading)
    _refuse_quantized(trainer, given, reading)
    if reading.refusals:
        lines = "".join(f"\n  {refusal}" for refusal in reading.refusals)
        raise NoPrediction(f"{path} cannot be planned as {trainer.name} trains it:{lines}")
    model = given.get(trainer.model)
    if not isinstance(model, str):
        reason, remedy = "is not the name of a model", "Write its name or its folder"
        raise ConfigError(trainer.model, model, reason, remedy)
    notes = [*reading.notes, *_unread(reading.not_read, reading.unknown, trainer)]
    return TrainerFile(path, trainer, model, reading.settings, ranks, tuple(notes))


def recognized(given: Mapping[str, Any], path: Path) -> str | None:
    """The name of the trainer whose file has these keys; None if no other trainer than torchtune has them.

    Raises:
        ConfigError: it is accelerate's, or may be of several trainers.
    """
    if _has_component(given):
        return None
    if not any(model in given for model, _ in _MARKS.values()):
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
        name: sorted(marks & set(given))
        for name, (model, marks) in _MARKS.items()
        if model in given and marks & set(given)
    }
    if len(found) == 1:
        return next(iter(found))
    if found:
        both = "; ".join(f"{name} has {', '.join(keys)}" for name, keys in found.items())
        raise ConfigError(
            _OPTION, str(path), f"has keys of several trainers ({both})", "Keep those of one"
        )
    looked = "; ".join(
        f"{name}: {model} and one of {', '.join(sorted(marks))}"
        for name, (model, marks) in _MARKS.items()
    )
    raise ConfigError(
        _OPTION, str(path), "may be of several trainers, or of none", f"Looked for, {looked}"
    )


def _trainer(name: str, given: Mapping[str, Any], asked: str | None) -> Trainer:
    """The table for a file; ``asked`` decides among TRL's, or the keys that only one of them has."""
    if name != _TRL:
        if asked:
            raise ConfigError("--trainer", asked, f"is not of a file of {name}", "Leave it out")
        return AXOLOTL if name == AXOLOTL.name else LLAMA_FACTORY
    if asked:
        if asked not in _TRAINERS:
            remedy = f"Use one of {', '.join(_TRAINERS)}"
            raise ConfigError("--trainer", asked, f"is not of a file of {name}", remedy)
        return _TRAINERS[asked]
    if set(GENERATED) & set(given):
        return RLOO if (RLOO.known() - GRPO.known()) & set(given) else GRPO
    return DPO if (DPO.known() - SFT.known()) & set(given) else SFT


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


def _launch(path: Path) -> dict[str, Any]:
    given = _loaded(path, "--accelerate")
    if given is None or not _OF_ACCELERATE & set(given):
        reason = "is not an accelerate configuration that can be read"
        remedy = (
            f"It has one of {', '.join(sorted(_OF_ACCELERATE))}; `accelerate config` writes one"
        )
        raise ConfigError("--accelerate", str(path), reason, remedy)
    return given


def _apply(given: dict[str, Any], change: str, trainer: Trainer) -> None:
    """Change a key, which may be one inside of a block: ``fsdp_config.version=2``."""
    key, equals, value = change.partition("=")
    first = key.partition(".")[0]
    if not equals:
        raise ConfigError("KEY=VALUE", change, "is not an override", "Write key=value")
    if first not in trainer.known():
        nearest = trainer.nearest(first)
        remedy = f"Did you mean {nearest}?" if nearest else "Write a key that its files have"
        raise ConfigError(first, value, f"is not a key of {trainer.name}", remedy)
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


def _refuse_quantized(trainer: Trainer, given: Mapping[str, Any], reading: FileReading) -> None:
    """Refuse weights of 4 or 8 bits that nothing trains, or that FSDP2 cannot shard."""
    bits = next((n for n in (4, 8) if reading.settings.get(f"load_in_{n}bit")), None)
    if bits and not reading.settings.get("lora"):
        key, value = trainer.adapters
        reason = f"trains the weights themselves, and those of {bits} bits have no gradients"
        remedy = f"Train adapters ({key}: {str(value).lower()})"
        reading.refuse(key, given.get(key), reason, remedy)
    if bits == 8 and reading.settings.get("fsdp"):
        reading.refusals.append(
            "weights of 8 bits with FSDP2, which cannot shard integers. Load them with 4 bits, or plan DDP "
            "without the keys for FSDP (more memory)."
        )


def _unread(ignored: Sequence[str], unknown: Sequence[str], trainer: Trainer) -> list[str]:
    found = []
    if ignored:
        found.append(
            f"not read: {', '.join(ignored)}; no memory of a training step depends on them"
        )
    for key in unknown:
        nearest = trainer.nearest(key)
        meant = f"; did you mean {nearest}?" if nearest else ""
        found.append(f"WARNING: {key} is unknown, and not read{meant}")
    return found


def _has_component(value: Any) -> bool:
    """Whether a value has ``_component_`` anywhere, as torchtune's configs have."""
    if isinstance(value, Mapping):
        return "_component_" in value or _any(value.values())
    return isinstance(value, list) and _any(value)


def _any(values: Iterable[Any]) -> bool:
    return any(map(_has_component, values))
