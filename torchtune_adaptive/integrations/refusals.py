"""Settings of a trainer that cannot be kept, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from torchtune_adaptive.common import UsageError

OF_TRL = {"SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer"}
"""Trainers of TRL whose loss does not depend on how rows are split, or that refuse where it does."""

Setting = Callable[[Any], Any]

REFUSED: dict[str, tuple[Setting, str]] = {
    "auto_find_batch_size": (bool, "the size is found without it. Leave it off"),
    "fp16": (bool, "the trainer's gradient scaler is not supported. Use bf16"),
    "deepspeed": (bool, "DeepSpeed takes the step itself. Use fsdp with version 2"),
    "parallelism_config": (bool, "only data parallelism is supported. Leave it out"),
    "ddp_broadcast_buffers": (
        bool,
        "buffers would be broadcast in each forward pass, where a rank without memory is missing. Leave it "
        "off",
    ),
    "ddp_static_graph": (bool, "gradients are not reduced by its graph. Leave it off"),
    "optim": (
        lambda name: any(
            part in str(getattr(name, "value", name)) for part in ("lomo", "layerwise")
        ),
        "it changes weights during backward, so a step could not be done again. Use another",
    ),
    "activation_offloading": (
        bool,
        "it cannot be reset after running out of memory. Use gradient_checkpointing",
    ),
}
"""Fields of training arguments: whether a value is refused, and why."""

WITHOUT_EFFECT = ("ddp_bucket_cap_mb", "ddp_find_unused_parameters", "dataloader_pin_memory")
"""Fields about the speed of what is done in another way: gradients are reduced at the end of a step, and
micro-batches are collated when they are taken."""

_OF_A_BATCH = {
    "aot": "sorts the rows of a micro-batch",
    "aot_unpaired": "sorts the rows of a micro-batch",
    "sft": "is a mean over the tokens of a micro-batch",
    "kto": "compares each row with the mean divergence of a micro-batch",
}
"""Losses of DPO and KTO that depend on how rows are split."""


def require_known_trainer(kind: type) -> None:
    """Check that the loss of a trainer is known not to depend on how rows are split."""
    for base in kind.__mro__:
        if base.__module__.startswith("trl.") and base.__name__.endswith("Trainer"):
            if base.__name__ in OF_TRL:
                return
            raise UsageError(
                f"{base.__name__}: of TRL's trainers, {', '.join(sorted(OF_TRL))} are supported."
            )


def require_supported(trainer: Any) -> None:
    """Check the settings of a trainer that has been made."""
    args, accelerator = trainer.args, trainer.accelerator
    for name, (is_refused, why) in REFUSED.items():
        value = getattr(args, name, None)
        if value is not None and is_refused(value):
            raise UsageError(f"{name}: {value!r} is not supported: {why}.")
    if trainer.is_deepspeed_enabled:
        raise UsageError(f"deepspeed: {REFUSED['deepspeed'][1]}.")
    if args.n_gpu > 1:
        raise UsageError(
            f"n_gpu: {args.n_gpu} devices in one process. Start one process for each, by torchrun."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise UsageError("fsdp: version 1 cannot be reset after running out of memory. Use 2.")
    if accelerator.scaler is not None:
        raise UsageError(f"mixed_precision: {REFUSED['fp16'][1]}.")
    loading, dataset = args.accelerator_config, trainer.train_dataset
    only_iterated = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    if dataset is not None and (only_iterated or loading.dispatch_batches):
        raise UsageError(
            "train_dataset: one that can only be iterated over, or that one rank loads for all "
            "(dispatch_batches), is not supported. Use one with a length."
        )
    if not loading.even_batches:
        raise UsageError("accelerator_config: even_batches must be on: ranks have the same rows.")
    for loss in _as_list(getattr(args, "loss_type", None)):
        if loss in _OF_A_BATCH:
            raise UsageError(
                f"loss_type: {loss} {_OF_A_BATCH[loss]}, so it depends on the micro-batch."
            )
    if getattr(getattr(trainer.model, "config", None), "output_router_logits", False):
        raise UsageError(
            "output_router_logits: the auxiliary loss is a mean over a micro-batch, so it depends on how "
            "rows are split. Turn it off in the model's config."
        )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
