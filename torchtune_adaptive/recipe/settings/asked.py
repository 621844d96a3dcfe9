"""What a run was asked for, told once: a config, the kind of recipe that it is for, and our settings in it.

Below ``settings`` nothing else reads a config, except for the blocks that torchtune's components are made of.
So defaults, and what keys of another kind mean, are decided in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.core import Split
from torchtune_adaptive.recipe.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.recipe.settings.keys import CONTEXT, KEYS, TENSORS
from torchtune_adaptive.recipe.settings.kind_table import KINDS, Kind, has_images, kind_of
from torchtune_adaptive.recipe.settings.mistakes import FIRST, Each

ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Args:
        cfg: the whole config. Components are made of its blocks.
        kind: the kind of the recipe.
        settings: our settings in it, checked.
    """

    cfg: DictConfig
    kind: Kind
    settings: AdaptiveSettings

    @classmethod
    def of(cls, cfg: DictConfig, kind: str | None = None, each: Each = FIRST) -> Asked:
        """What a config asks for: of the kind of that name, or of the one that the config is for. Each of our
        settings is read within ``each``."""
        about = kind_of(cfg) if kind is None else KINDS[kind]
        asked = cls(cfg, about, AdaptiveSettings.from_config(cfg, each))
        if asked.settings.on_out_of_memory is None and asked.no_retry:
            asked = replace(asked, settings=replace(asked.settings, on_out_of_memory="raise"))
        return asked

    def __getitem__(self, key: str) -> Any:
        """The value of one of torchtune's keys: its default where it is null or missing, and where this kind
        of recipe does not know the key."""
        row = KEYS[key]
        if self.kind.name not in row.kinds or key not in self.cfg:
            return row.default
        value = self.cfg[key]
        return row.default if value is None else value

    def resolved(self) -> Asked:
        """The same, of a config without references, as another process can have it."""
        cfg: Any = OmegaConf.create(OmegaConf.to_container(self.cfg, resolve=True))
        return replace(self, cfg=cfg)

    def batch(self, ranks: int) -> Split:
        """The batch of the config on a number of ranks; of a rollout, the rows of a step."""
        if self.kind.generates:
            samples = "grpo_samples" in self.kind.keys
            rows = self["batch_size"] * self["grpo_samples"] if samples else self["ppo_batch_size"]
            micro_batch = -(-rows // self.accumulation)
            return Split(micro_batch, -(-rows // micro_batch), ranks, rows)
        return Split(self["batch_size"], self.accumulation, ranks)

    @property
    def accumulation(self) -> int:
        """The micro-batches in a step; of a rollout, where the config says it."""
        return int(self[ACCUMULATION])

    @property
    def holders(self) -> int:
        """The number of ranks that hold the same rows: those that split layers by tensor parallelism."""
        return int(self[TENSORS])

    @property
    def contexts(self) -> int:
        """The number of ranks that have parts of the same rows (context parallelism)."""
        return int(self[CONTEXT])

    @property
    def sharers(self) -> int:
        """The number of ranks with the same rows, or parts of them."""
        return self.holders * self.contexts

    def packed(self, block: str = "dataset") -> bool:
        """Whether samples are packed; a list of datasets is if all of them are (torchtune has no mixture)."""
        datasets = self.cfg.get(block) or {}
        if not isinstance(datasets, ListConfig):
            return bool(datasets.get("packed", False))
        return bool(datasets) and all(one.get("packed", False) for one in datasets)

    @property
    def images(self) -> bool:
        """Whether samples have images."""
        return has_images(self.cfg)

    @property
    def quantized(self) -> bool:
        """Whether weights or the optimizer's state are kept in fewer bits than they are used in."""
        optimizer = str(OmegaConf.select(self.cfg, "optimizer._component_"))
        return self.quantized_weights or "bit" in optimizer.lower()

    @property
    def quantized_weights(self) -> bool:
        """Whether frozen weights are kept in fewer bits than they are used in."""
        model = str(OmegaConf.select(self.cfg, "model._component_"))
        return "qlora" in model or bool((self.cfg.get("model") or {}).get("quantize_base"))

    @property
    def compiled_for_gpu(self) -> bool:
        """Whether steps are compiled; on the simulated device, which sees operations, nothing is."""
        return bool(self["compile"]) and self["device"] != "cpu"

    @property
    def no_retry(self) -> str | None:
        """The reason why no step can be retried after running out of memory, if there is one."""
        if self["optimizer_in_bwd"]:
            return "with optimizer_in_bwd, a step changes parameters before it is over"
        for key in (TENSORS, CONTEXT):
            if self[key] != 1 and self["compile"]:
                return f"with {key} and compile, what a step launches cannot be recorded"
        return None
