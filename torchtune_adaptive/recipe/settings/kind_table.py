"""The kinds of recipe, and which configs are for which.

What a kind does is in ``kinds/``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.settings.adaptive import (
    BLOCK,
    block_keys,
    close_match,
    plain_value,
    top_level_keys,
)
from torchtune_adaptive.recipe.settings.keys import KEYS
from torchtune_adaptive.recipe.settings.mistakes import FIRST, Each


@dataclass(frozen=True)
class FrozenModel:
    """A model that a kind uses without training it, by the keys of its block and of its checkpointer's."""

    model: str
    checkpointer: str


@dataclass(frozen=True)
class Kind:
    """A kind of recipe."""

    name: str
    """It is part of the names of the kind's configs."""

    torchtunes: str
    """The recipe of torchtune that it takes the place of, or the name that it would have there."""

    adapters: bool = False
    """Whether adapters are trained, and the model itself stays as it is."""

    frozen: tuple[FrozenModel, ...] = ()
    """The models that are in memory besides the one that is trained."""

    sample: Literal["row", "pair", "prompt"] = "row"
    """The kind of a sample: a row of tokens, two rows that are compared, or a prompt."""

    @property
    def recipe(self) -> str:
        """Our recipe."""
        return f"adaptive_{self.torchtunes.removeprefix('dev/').removesuffix('_single_device')}"

    @property
    def generates(self) -> bool:
        """Whether the model that is trained makes the rows, from prompts: reinforcement learning."""
        return self.sample == "prompt"

    @property
    def keys(self) -> frozenset[str]:
        """The top-level keys that it knows."""
        theirs = {key for key, row in KEYS.items() if self.name in row.kinds}
        return frozenset(theirs | {BLOCK} | top_level_keys())


_REFERENCE = FrozenModel("model", "ref_checkpointer")
_TEACHER = FrozenModel("teacher_model", "teacher_checkpointer")
_REFERENCE_POLICY = FrozenModel("policy_model", "ref_policy_checkpointer")
_REWARD = FrozenModel("reward_and_value_model", "reward_checkpointer")

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("full", "full_finetune_distributed"),
        Kind("lora", "lora_finetune_distributed", adapters=True),
        Kind("full_dpo", "full_dpo_distributed", frozen=(_REFERENCE,), sample="pair"),
        Kind("lora_dpo", "lora_dpo_distributed", adapters=True, sample="pair"),
        Kind("kd", "knowledge_distillation_distributed", adapters=True, frozen=(_TEACHER,)),
        Kind("qat", "qat_distributed"),
        Kind("qat_lora", "qat_lora_finetune_distributed", adapters=True),
        Kind("grpo", "dev/grpo_full_finetune_distributed", frozen=(_REFERENCE,), sample="prompt"),
        Kind("grpo_lora", "dev/grpo_lora_finetune_distributed", adapters=True, sample="prompt"),
        Kind(
            "ppo",
            "ppo_full_finetune_single_device",
            frozen=(_REFERENCE_POLICY, _REWARD),
            sample="prompt",
        ),
    )
}
"""Our kinds of recipe, by name. The keys that each knows are in ``keys.py``."""

KNOWN_KEYS = frozenset().union(*(kind.keys for kind in KINDS.values()))
"""The top-level keys that any recipe knows."""

_OURS_BEGIN = (
    *("use_", "batch_increase_", "adaptive_", "token_budget", "keep_last_", "save_", "run_val_"),
)
"""What a key of ours begins with. One that is none of them would be missed in silence, so it is an error."""

_ELSEWHERE = {
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "micro_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "max_batch_size": "use_maximum_batch_size",
    "auto_find_batch_size": "use_maximum_batch_size",
    "grad_accum_steps": "gradient_accumulation_steps",
    "max_grad_norm": "clip_grad_norm",
    "gradient_clip_val": "clip_grad_norm",
    "gradient_checkpointing": "enable_activation_checkpointing",
    "max_steps": "max_steps_per_epoch",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "warmup_steps": "lr_scheduler.num_warmup_steps",
    "logging_steps": "log_every_n_steps",
    "eval_steps": "run_val_every_n_steps",
    "validate_every_n_steps": "run_val_every_n_steps",
    "sequence_len": "tokenizer.max_seq_len",
    "max_seq_len": "tokenizer.max_seq_len",
    "resume": "resume_from_checkpoint",
}
"""Keys of other tools, and ours."""


# --- which configs are whose ----------------------------------------------------------------------

Mark = Callable[[DictConfig], str | None]
"""A function that gives the key by which a config shows what it is for, if it does."""


def _has(*keys: str) -> Mark:
    return lambda cfg: next((key for key in keys if _is_set(cfg, key)), None)


def _has_without(key: str, without: str) -> Mark:
    return lambda cfg: key if _is_set(cfg, key) and without not in cfg else None


def _is_set(cfg: DictConfig, key: str) -> bool:
    # OmegaConf looks for similar keys when one is asked for that is not there, and most of these are not.
    return key in cfg and cfg.get(key) is not None


def _compares(cfg: DictConfig) -> str | None:
    """Preferences: torchtune's losses for pairs, its datasets of pairs, or a reference model."""
    if re.match(r"torchtune\.rlhf\.loss\.", _component(cfg, "loss")):
        return "loss"
    if re.search(r"\.(preference|stack_exchange_paired|hh_rlhf)", _component(cfg, "dataset")):
        return "dataset"
    return _has("ref_checkpointer")(cfg)


def _component(cfg: DictConfig, key: str) -> str:
    block = cfg.get(key)
    return str(block.get("_component_") or "") if isinstance(block, DictConfig) else ""


_MARKS: tuple[tuple[str, Mark, bool | None], ...] = (
    # Recipes of torchtune, what their configs show, and whether their models have adapters, if it matters.
    ("eleuther_eval", _has("tasks"), None),
    ("generate", _has("max_new_tokens"), None),
    ("quantize", _has_without("quantizer", "optimizer"), None),
    ("ppo_full_finetune_single_device", _has("policy_model"), None),
    ("dev/async_grpo_full_finetune_distributed", _has("orchestration"), None),
    ("dev/grpo_lora_finetune_distributed", _has("grpo_samples"), True),
    ("dev/grpo_full_finetune_distributed", _has("grpo_samples"), False),
    ("dev/early_exit_finetune_distributed", _has("early_exit_loss", "layer_dropout"), None),
    ("dev/lora_finetune_distributed_multi_dataset", _has("datasets"), None),
    ("knowledge_distillation_distributed", _has("teacher_model", "kd_loss"), None),
    ("qat_lora_finetune_distributed", _has("quantizer"), True),
    ("qat_distributed", _has("quantizer"), False),
    ("lora_dpo_distributed", _compares, True),
    ("full_dpo_distributed", _compares, False),
    ("lora_finetune_distributed", lambda cfg: "model.lora_attn_modules", True),
    ("full_finetune_distributed", lambda cfg: "model", False),
)


def _purpose(cfg: DictConfig) -> tuple[str, str]:
    """The recipe of torchtune that a config is for, and the key that shows it.

    Raises:
        ConfigError: it is a config of another program.
    """
    written: Any = OmegaConf.to_container(cfg)
    if not any(isinstance(block, dict) and "_component_" in block for block in written.values()):
        raise ConfigError(
            "model._component_",
            None,
            "is missing, and no other block has a _component_: this is not a torchtune config",
            "Start from one: `tune-adaptive ls` lists them, and docs/compared.md has the equivalents of "
            "other tools' keys",
        )
    model = cfg.get("model")
    adapters = isinstance(model, DictConfig) and "lora_attn_modules" in model
    return next(
        (theirs, key)
        for theirs, mark, needed in _MARKS
        if needed in (None, adapters) and (key := mark(cfg)) is not None
    )


def kind_of(cfg: DictConfig) -> Kind:
    """The kind of recipe that a config is for.

    Raises:
        ConfigError: none of ours.
    """
    theirs, key = _purpose(cfg)
    for kind in KINDS.values():
        if kind.torchtunes == theirs:
            return kind
    raise _for_another(cfg, key, theirs, "any of ours")


def require_own(cfg: DictConfig, kind: Kind) -> None:
    """Raise ``ConfigError`` for a config that is for another kind of recipe, naming that.

    A loss of the user's own tells nothing about what is compared, so there the recipe is believed.
    """
    theirs, key = _purpose(cfg)
    if theirs == kind.torchtunes:
        return
    unmarked = KINDS["lora" if kind.adapters else "full"].torchtunes == theirs
    if unmarked and not re.match(r"(torch|torchtune)\.", _component(cfg, "loss")):
        return
    raise _for_another(cfg, key, theirs, kind.recipe)


def _for_another(cfg: DictConfig, key: str, theirs: str, recipe: str) -> ConfigError:
    ours = next((kind.recipe for kind in KINDS.values() if kind.torchtunes == theirs), None)
    value: Any = OmegaConf.select(cfg, key)
    if isinstance(value, DictConfig) and "_component_" in value:
        value = value._component_
    return ConfigError(
        key,
        OmegaConf.to_container(value) if OmegaConf.is_config(value) else value,
        f"makes this a config for {ours or theirs}, not for {recipe}",
        f"Use {ours}" if ours else f"Use torchtune's {theirs}, which has no adaptive counterpart",
    )


def has_images(cfg: DictConfig) -> bool:
    """Whether samples have images, by the function that makes batches of them."""
    return "tiled_images" in str(cfg.get("collate_fn") or "")


def unused_keys(cfg: DictConfig, kind: Kind, each: Each = FIRST) -> list[str]:
    """Top-level keys that the recipe ignores; each is looked at within ``each``.

    A key that other values refer to (``${max_seq_len}``) is a variable and is never reported.

    Raises:
        ConfigError: a key is misspelled, or is one of our settings outside of its block.
    """
    known = kind.keys
    text = OmegaConf.to_yaml(cfg, resolve=False)
    unused = []
    for key in map(str, cfg):
        if key in known or re.search(r"\$\{" + re.escape(key) + r"[}.\[]", text):
            continue
        with each:
            _require_no_misspelling(cfg, key, known)
            unused.append(key)
    return unused


def _require_no_misspelling(cfg: DictConfig, key: str, known: frozenset[str]) -> None:
    if key.lower() in block_keys():
        name = f"{BLOCK}.{key.lower()}"
        value = plain_value(cfg, key)
        raise ConfigError(
            key, value, "is in the wrong place", f"It belongs in {BLOCK}: {name}={value}"
        )
    ours = key.lower().startswith(_OURS_BEGIN)
    meant = close_match(key, known, cutoff=0.6 if ours else 0.87)
    if key not in KNOWN_KEYS and (meant or ours):
        remove = f"remove it (~{key} on the command line)"
        raise ConfigError(
            key,
            plain_value(cfg, key),
            "is set, but the recipe has no such key"
            + (f"; it looks like {meant}" if meant else ""),
            f"Rename it to {meant}, or {remove}" if meant else remove.capitalize(),
        )


def about_unused(key: str, kind: Kind) -> str:
    """The warning about a top-level key that the recipe ignores, with the one that was probably meant."""
    meant = None
    if key not in KNOWN_KEYS:
        meant = _ELSEWHERE.get(key.lower()) or close_match(key, kind.keys, cutoff=0.7)
    question = f" Did you mean {meant}?" if meant else ""
    return f"Warning: {key}: {kind.recipe} has no such key, so it changes nothing.{question}"
