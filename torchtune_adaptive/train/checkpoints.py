"""Load what a run starts from, save what it has become, in torchtune's own formats.

A checkpoint of these recipes is a checkpoint of torchtune's and the other way round.
"""

from __future__ import annotations

import logging
import shutil
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torchtune import config, training
from torchtune.modules.peft import (
    get_adapter_state_dict,
    get_lora_module_names,
    get_merged_lora_ckpt,
)
from torchtune.training import OptimizerInBackwardWrapper
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.setup.environment import Environment
from torchtune_adaptive.setup.model import Model
from torchtune_adaptive.setup.optimizer import Optimizers
from torchtune_adaptive.train.progress import Progress

log = logging.getLogger(__name__)


class Checkpoints(ABC):
    """Loads what a run starts from, and saves what it has become, by torchtune's checkpointer."""

    _adapters_only = False

    def __init__(self, cfg: DictConfig, environment: Environment) -> None:
        self._environment = environment
        self._resumes = cfg.resume_from_checkpoint
        self._asynchronous = cfg.get("enable_async_checkpointing", False)
        self._output_dir = Path(cfg.output_dir)
        optimizer = cfg.optimizer._component_
        between_epochs = cfg.epochs > 1 or cfg.get("save_every_n_steps") is not None
        if optimizer.startswith("torchao.optim.") and environment.ranks > 1 and between_epochs:
            raise ConfigError(  # or the first checkpoint would end the run
                "optimizer",
                optimizer,
                "has quantised state, which torch cannot gather from several ranks for a checkpoint "
                "between epochs",
                "Use another optimizer, one rank, or epochs=1 without save_every_n_steps",
            )
        self._checkpointer = config.instantiate(
            cfg.checkpointer, should_load_recipe_state=self._resumes and not self._asynchronous
        )

    def load(self) -> dict[str, Any]:
        """The weights to start from and, in a run that is resumed, the recipe's state."""
        return self._checkpointer.load_checkpoint()

    def save(self, model: Model, optimizers: Optimizers, progress: Progress, name: str) -> None:
        """Save a checkpoint ``epoch_<name>``; of those in mid-epoch, only the newest stays."""
        started = time.perf_counter()
        is_rank_zero = self._environment.is_rank_zero
        log.info("Saving checkpoint. This may take some time. Retrieving full model state dict...")
        weights = training.gather_cpu_state_dict(
            model.module,
            is_rank_zero,
            device=self._environment.device,
            adapter_weights_only=self._adapters_only,
        )
        state: dict[str, Any] = {}
        if progress.is_unfinished:
            state = progress.state_dict()
            state[training.OPT_KEY] = self._optimizer_state(model, optimizers)
        if is_rank_zero:
            self._checkpointer.save_checkpoint(
                {**state, **self._parts(weights)},
                epoch=name,
                intermediate_checkpoint=progress.is_unfinished,
                adapter_only=self._adapters_only,
            )
            log.info(f"Saving checkpoint took {time.perf_counter() - started:.2f} secs")
            self._keep_only(name)
        dist.barrier()

    def _optimizer_state(self, model: Model, optimizers: Optimizers) -> dict[str, Any]:
        def full_state(optimizer: Any) -> dict[str, Any]:
            return training.get_full_optimizer_state_dict(
                model.module,
                optimizer,
                self._environment.is_rank_zero,
                device=self._environment.device,
            )

        if isinstance(optimizers.saved, OptimizerInBackwardWrapper):
            return {name: full_state(one) for name, one in optimizers.saved.optim_map.items()}
        return full_state(optimizers.saved)

    def _keep_only(self, name: str) -> None:
        """A checkpoint in mid-epoch gives way to the next one, once that is complete."""
        for folder in self._output_dir.glob("epoch_*_step_*"):
            if folder.name != f"epoch_{name}":
                shutil.rmtree(folder, ignore_errors=True)

    @abstractmethod
    def _parts(self, weights: dict[str, Any]) -> dict[str, Any]:
        """What the checkpointer expects of the weights, on rank 0."""


class FullCheckpoints(Checkpoints):
    """Of a model of which every weight is trained; also asynchronous ones."""

    def __init__(self, cfg: DictConfig, environment: Environment) -> None:
        super().__init__(cfg, environment)
        if self._asynchronous:
            self._client = CheckpointClient(cfg)
            # An asynchronous save runs collectives in a thread; on the group that training uses, the two
            # would meet. The client makes its checkpointer on first use and has no setting for the group,
            # hence the private attribute (torchtune 0.6.1).
            self._client._dcp_checkpointer = training.DistributedCheckpointer(
                checkpoint_dir=cfg.checkpointer.checkpoint_dir,
                output_dir=cfg.checkpointer.output_dir,
                process_group=dist.new_group(backend="gloo"),
            )

    def resume_asynchronous(self, model: Model, optimizers: Optimizers, progress: Progress) -> None:
        """Put the latest asynchronous checkpoint into the model, the optimizer, and the progress."""
        if optimizers.in_backward:
            # Only what the optimizer holds already is loaded. The client sees to that for one optimizer, and
            # forgets it for many, which would go on without their state.
            for optimizer in optimizers.steppers:
                _init_optim_state(optimizer)
        progress.resume(self._client.load_distributed_checkpoint(model.module, optimizers.saved))
        beside = self._beside(f"{progress.epochs_run - 1}")
        if beside.exists():
            progress.training = torch.load(beside, weights_only=True)

    @property
    def asynchronous(self) -> bool:
        return self._asynchronous

    def save(self, model: Model, optimizers: Optimizers, progress: Progress, name: str) -> None:
        if not (self._asynchronous and progress.is_unfinished):
            super().save(model, optimizers, progress, name)
            return
        if self._environment.is_rank_zero:
            self._beside(name).parent.mkdir(parents=True, exist_ok=True)
            torch.save(progress.training, self._beside(name))
        self._client.save_checkpoint(
            model.module, optimizers.saved, progress.as_torchtune(), int(name)
        )

    def _beside(self, name: str) -> Path:
        """A distributed checkpoint has no place for what torchtune does not know."""
        return self._output_dir / "recipe_state" / f"training_state_{name}.pt"

    def _parts(self, weights: dict[str, Any]) -> dict[str, Any]:
        return {training.MODEL_KEY: weights}


class LoRACheckpoints(Checkpoints):
    """Of adapters, and of the model that they are merged into."""

    def __init__(self, cfg: DictConfig, environment: Environment) -> None:
        super().__init__(cfg, environment)
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

    def load(self) -> dict[str, Any]:
        """The base weights and, in a run that is resumed, the adapters and the recipe's state."""
        checkpoint = super().load()
        if self._resumes and training.ADAPTER_KEY not in checkpoint:
            raise ValueError(
                "There are no adapter weights to resume from. Set checkpointer.adapter_checkpoint to the "
                "adapter_model.pt of the epoch to go on after."
            )
        return checkpoint

    def _parts(self, weights: dict[str, Any]) -> dict[str, Any]:
        parts = {
            training.ADAPTER_KEY: get_adapter_state_dict(weights),
            training.ADAPTER_CONFIG: dict(self._adapter),
        }
        if not self._adapters_only:
            parts[training.MODEL_KEY] = get_merged_lora_ckpt(
                weights, rank=self._adapter["r"], alpha=self._adapter["lora_alpha"]
            )
        return parts


def last_saved(output_dir: Path) -> str:
    """For messages: where the newest checkpoint of a run lies."""
    folders = [*output_dir.glob("epoch_*"), *output_dir.glob("dist_epoch_*")]
    newest = max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
    return str(newest) if newest else "none has been saved yet"
