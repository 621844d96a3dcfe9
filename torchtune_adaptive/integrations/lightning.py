"""Lightning's ``LightningModule``, trained in micro-batches of the size that fits.

    from torchtune_adaptive.integrations.lightning import adaptive

    trainer.fit(adaptive(MyModule)(...), loader)

Optimization stays automatic. The rows of an optimizer step are what they were: those of a batch, times
``accumulate_grad_batches``. With the last of its batches the whole step is taken, in micro-batches of the
size that a search finds before the first. What a micro-batch adds to the loss is what the module's own
``training_step`` returns. The trainer finds the gradient of the step in ``.grad``: clipping, the optimizer,
the schedule, ``global_step``, callbacks and checkpoints stay its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from torchtune_adaptive.common import UsageError, check_versions, counted
from torchtune_adaptive.integrations import private
from torchtune_adaptive.integrations.module_step import ModuleStep
from torchtune_adaptive.integrations.options import Adaptive
from torchtune_adaptive.integrations.rows import Keeping, KeptRows

Kind = TypeVar("Kind", bound=type)
_Module: Any = object
"""What stands for the module, which is the next base of a class with the mixin."""


def adaptive(module: Kind, options: Adaptive | None = None) -> Kind:
    """A subclass of a module that is trained in micro-batches of the size that fits."""
    own = {} if options is None else {"adaptive": options}
    return type(f"Adaptive{module.__name__}", (AdaptiveModuleMixin, module), own)  # type: ignore[return-value]


class AdaptiveModuleMixin(_Module):
    """Makes a trainer of Lightning take the steps of a module in micro-batches of the size that fits.

        class AdaptiveModule(AdaptiveModuleMixin, MyModule): ...

    A module may have four more attributes:

        adaptive: the ``Adaptive`` to use.
        adaptive_num_items: function that gives the number of terms that the loss of a batch is a mean of,
            such as tokens; by default, they are rows.
        restored: names of attributes that ``training_step`` changes, such as metrics, which are set back
            before a step is done again.
        activation_checkpointing: two functions that turn it on and off.

    Raises:
        UsageError: when training begins, if a setting of the module or the trainer cannot be kept.
    """

    _step: ModuleStep | None = None
    _resumed: dict[str, Any] | None = None
    _taken: ExitStack | None = None
    _rows: list[KeptRows]
    trainer: Any

    # --- the loader, which keeps rows -------------------------------------------------------------

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        check_versions("lightning")
        _require_supported(self, super().training_step, super().backward)
        self._step = self._resumed = None  # a checkpoint is loaded after this
        self._rows = []
        private.pass_loader_through(self.trainer, _keeping_rows)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._require_same_processes()
        self._taken = ExitStack()
        wrapped = self.trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel):
            # Nothing is reduced but by the step; and a rank without memory would miss a broadcast.
            self._taken.enter_context(wrapped.no_sync())
            wrapped.broadcast_buffers = False

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._taken is not None:
            self._taken.close()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, KeptRows):
            self._rows.append(batch)
            batch = self.trainer.precision_plugin.convert_input(batch.inputs)
        return super().on_before_batch_transfer(batch, dataloader_idx)

    # --- the step -----------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        trainer, batches = self.trainer, self.trainer.accumulate_grad_batches
        if (batch_idx + 1) % batches and not trainer.is_last_batch:
            return torch.zeros((), device=self.device)
        if self._step is None:
            self._step = ModuleStep(self, trainer, super().training_step, self._resumed)
        rows, self._rows = self._rows, []
        loss = self._step.take(rows, batch_idx, super().log)
        # Of which the trainer takes the share of one batch.
        return torch.tensor(loss * batches, device=self.device)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Nothing: the step has dropped what was there, and has made a gradient."""

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the step has gone backward."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._step is None or not self._step.collect(name, value, args, kwargs):
            super().log(name, value, *args, **kwargs)

    def all_gather(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        if self._step is None:
            return super().all_gather(data, *args, **kwargs)
        return self._step.together(super().all_gather, data, *args, **kwargs)

    # --- checkpoints ----------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._step is not None:
            checkpoint[_KEY] = {
                **(self._step.learned or {}),
                "processes": self.trainer.world_size,
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._resumed = checkpoint.get(_KEY)

    def _require_same_processes(self) -> None:
        """Check that there are as many processes as in the run that is resumed."""
        now = self.trainer.world_size
        before = (self._resumed or {}).get("processes", now)
        if before != now:
            raise UsageError(
                f"ckpt_path: of a run on {counted(before, 'process', 'processes')}, and there "
                f"{'is' if now == 1 else 'are'} {now}. Lightning counts the batches of each, so epochs would "
                f"have other steps. Resume on {before}, or load the weights alone (load_from_checkpoint)."
            )


_KEY = "torchtune_adaptive"
"""Where a checkpoint has what was found and learned."""


def _keeping_rows(loader: Any) -> Any:
    """The same loader, whose batches are ``KeptRows``."""
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"train_dataloader: a {type(loader).__name__} is not a torch.utils.data.DataLoader, which has "
            "rows and a function that collates them. Pass one."
        )
    if isinstance(loader.collate_fn, Keeping):
        return loader
    loader = copy(loader)  # that of the user also validates, maybe
    loader.collate_fn = Keeping(loader.collate_fn)
    return loader


def _require_supported(
    module: Any, training_step: Callable[..., Any], backward: Callable[..., Any]
) -> None:
    """Check what cannot be kept."""
    trainer = module.trainer
    if backward.__qualname__ != "LightningModule.backward":
        raise UsageError(
            f"backward: {backward.__qualname__} would not be called, as the step goes backward itself. "
            "Change the loss in training_step, or call AdaptiveStep in a loop of your own."
        )
    if callable(getattr(module, "num_items", None)) and not hasattr(module, "adaptive_num_items"):
        raise UsageError(
            "num_items: what counts the terms of a loss is now adaptive_num_items. Rename it, or set "
            "adaptive_num_items = None if it is something else."
        )
    if getattr(module, "adaptive", Adaptive()).dropout == "sample":
        raise UsageError(
            "dropout: by sample, but Lightning's loaders do not say which rows other processes have. Leave "
            "it out, or call AdaptiveStep in a loop of your own."
        )
    if not module.automatic_optimization:
        raise UsageError(
            "automatic_optimization: False leaves the step to your training_step. Call AdaptiveStep there."
        )
    if "dataloader_iter" in inspect.signature(training_step).parameters:
        raise UsageError(
            "training_step: takes dataloader_iter, not a batch, so rows are not known."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise UsageError(
            "precision: the trainer's gradient scaler is not supported. Use bf16-mixed."
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise UsageError(
            f"strategy: a {type(trainer.strategy).__name__} takes the step itself. Use DDP, or "
            "ModelParallelStrategy with fully_shard."
        )
