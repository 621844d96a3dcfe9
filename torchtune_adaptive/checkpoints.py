"""Load what a run starts from, save what it has become, in torchtune's own formats.

A checkpoint of these recipes is a checkpoint of torchtune's and the other way round.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.checkpoint.state_dict import _init_optim_state  # as torchtune does
from torchtune import config, training
from torchtune.modules.peft import (
    get_adapter_state_dict,
    get_lora_module_names,
    get_merged_lora_ckpt,
)
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress

from torchtune_adaptive.build import Environment, Model, Optimizers

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is, and what a checkpoint keeps of that."""

    seed: int
    total_epochs: int
    max_steps_per_epoch: int | None
    epochs_run: int = 0

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Go on where a checkpoint was saved; what would change the run's course stays as it was."""
        keys = (
            training.EPOCHS_KEY,
            training.SEED_KEY,
            training.MAX_STEPS_KEY,
            training.TOTAL_EPOCHS_KEY,
        )
        missing = [key for key in keys if key not in checkpoint]
        if missing:
            raise ValueError(
                f"The checkpoint to resume from has no {missing[0]!r}: it is the end of a run, or of another "
                "recipe. Give checkpointer.recipe_checkpoint the recipe state of an earlier epoch."
            )
        epochs_run, seed, max_steps, total_epochs = (checkpoint[key] for key in keys)
        self.epochs_run = epochs_run
        if self.seed != seed:
            log.warning(
                f"seed {self.seed} -> {seed} (the checkpoint's; a resumed run keeps its seed)"
            )
            self.seed = seed
        if self.max_steps_per_epoch != max_steps:
            log.warning(
                f"max_steps_per_epoch {self.max_steps_per_epoch} -> {max_steps} (the checkpoint's)"
            )
            self.max_steps_per_epoch = max_steps
        if self.total_epochs != total_epochs:
            log.warning(f"epochs {total_epochs} -> {self.total_epochs} (the config's)")

    def as_torchtune(self) -> TrainingProgress:
        return TrainingProgress(
            seed=self.seed,
            epochs_run=self.epochs_run,
            total_epochs=self.total_epochs,
            max_steps_per_epoch=self.max_steps_per_epoch,
        )


class FullCheckpoints:
    """Checkpoints of a model of which every weight is trained; also asynchronous ones."""

    def __init__(self, cfg: DictConfig) -> None:
        self._client = CheckpointClient(cfg)
        self._asynchronous = cfg.get("enable_async_checkpointing", False)
        if self._asynchronous:
            self._save_on_a_group_of_its_own(cfg)

    def _save_on_a_group_of_its_own(self, cfg: DictConfig) -> None:
        """An asynchronous save runs collectives in a thread; on the group that training uses, the two
        would meet. The client makes its checkpointer on first use and has no setting for the group, hence
        the private attribute (torchtune 0.6.1)."""
        self._client._dcp_checkpointer = training.DistributedCheckpointer(
            checkpoint_dir=cfg.checkpointer.checkpoint_dir,
            output_dir=cfg.checkpointer.output_dir,
            process_group=dist.new_group(backend="gloo"),
        )

    def load(self) -> dict[str, Any]:
        """The weights to start from and, in a run that is resumed, the recipe's state."""
        return self._client.load_base_checkpoint()

    def load_asynchronous(self, model: Model, optimizers: Optimizers) -> dict[str, Any]:
        """Put the latest asynchronous checkpoint into the model and the optimizer."""
        if optimizers.in_backward:
            # Only what the optimizer holds already is loaded. The client sees to that for one optimizer, and
            # forgets it for many, which would go on without their state.
            for optimizer in optimizers.steppers:
                _init_optim_state(optimizer)
        return self._client.load_distributed_checkpoint(model.module, optimizers.saved)

    @property
    def asynchronous(self) -> bool:
        return self._asynchronous

    def save(self, model: Model, optimizers: Optimizers, progress: Progress, epoch: int) -> None:
        self._client.save_checkpoint(model.module, optimizers.saved, progress.as_torchtune(), epoch)


class LoRACheckpoints:
    """Checkpoints of adapters, and of the model that they are merged into."""

    def __init__(self, cfg: DictConfig, environment: Environment) -> None:
        self._environment = environment
        self._resumes = cfg.resume_from_checkpoint
        self._adapters_only = cfg.get("save_adapter_weights_only", False)
        self._adapter = {
            "r": cfg.model.lora_rank,
            "lora_alpha": cfg.model.lora_alpha,
            "target_modules": get_lora_module_names(
                list(cfg.model.lora_attn_modules),
                cfg.model.apply_lora_to_mlp,
                cfg.model.get("apply_lora_to_output", False),
            ),
            "peft_type": "LORA",
        }
        self._checkpointer = config.instantiate(
            cfg.checkpointer, should_load_recipe_state=self._resumes
        )

    def load(self) -> dict[str, Any]:
        """The base weights and, in a run that is resumed, the adapters and the recipe's state."""
        checkpoint = self._checkpointer.load_checkpoint()
        if self._resumes and training.ADAPTER_KEY not in checkpoint:
            raise ValueError(
                "There are no adapter weights to resume from. Set checkpointer.adapter_checkpoint to the "
                "adapter_model.pt of the epoch to go on after."
            )
        return checkpoint

    def save(self, model: Model, optimizers: Optimizers, progress: Progress, epoch: int) -> None:
        started = time.perf_counter()
        unfinished = epoch + 1 < progress.total_epochs
        is_rank_zero = self._environment.is_rank_zero
        log.info("Saving checkpoint. This may take some time. Retrieving full model state dict...")
        weights = training.gather_cpu_state_dict(
            model.module,
            is_rank_zero,
            device=self._environment.device,
            adapter_weights_only=self._adapters_only,
        )
        checkpoint: dict[str, Any] = {}
        if unfinished:
            checkpoint.update(progress.as_torchtune().state_dict())
            checkpoint[training.OPT_KEY] = training.get_full_optimizer_state_dict(
                model.module, optimizers.saved, is_rank_zero, device=self._environment.device
            )
        if is_rank_zero:
            checkpoint[training.ADAPTER_KEY] = get_adapter_state_dict(weights)
            if not self._adapters_only:
                checkpoint[training.MODEL_KEY] = get_merged_lora_ckpt(
                    weights, rank=self._adapter["r"], alpha=self._adapter["lora_alpha"]
                )
            checkpoint[training.ADAPTER_CONFIG] = dict(self._adapter)
            self._checkpointer.save_checkpoint(
                checkpoint,
                epoch=epoch,
                intermediate_checkpoint=unfinished,
                adapter_only=self._adapters_only,
            )
            log.info(f"Saving checkpoint took {time.perf_counter() - started:.2f} secs")
        dist.barrier()


def last_saved(output_dir: Path) -> str:
    """For messages: where the newest checkpoint of a run lies."""
    folders = [*output_dir.glob("epoch_*"), *output_dir.glob("dist_epoch_*")]
    newest = max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
    return str(newest) if newest else "none has been saved yet"
