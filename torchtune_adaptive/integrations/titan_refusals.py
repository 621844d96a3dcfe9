"""Settings of torchtitan that cannot be kept, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import nn

from torchtune_adaptive.common import UsageError, launcher
from torchtune_adaptive.integrations.options import Adaptive


def _above_one(degree: int) -> bool:
    return degree > 1


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parallelism.pipeline_parallel_degree": (
        _above_one,
        "a rank without memory cannot make the sends of a pipeline alone. Set it to 1",
    ),
    "parallelism.context_parallel_degree": (
        _above_one,
        "sequences that are divided among ranks have not been tested. Set it to 1",
    ),
    "parallelism.expert_parallel_degree": (
        _above_one,
        "experts would count the tokens of a retried step twice. Use a dense model",
    ),
    "parallelism.enable_fsdp_symm_mem": (
        bool,
        "a rank without memory cannot tell whether it has made a copy in symmetric memory. Turn it off",
    ),
    "compile.enable_async_tensor_parallel": (
        bool,
        "a rank without memory cannot tell whether it has made a copy in symmetric memory. Turn it off",
    ),
    "training.disable_cuda_graphs": (
        lambda disabled: not disabled,
        "a captured graph has one size of micro-batch, and cannot be left in the middle. Set it to True "
        "(--training.disable_cuda_graphs)",
    ),
    "training.mixed_precision_param": (
        lambda name: name == "float16",
        "without a gradient scaler small gradients would be lost. Use bfloat16",
    ),
    "debug.spmd_typechecking": (bool, "it has not been tested. Turn it off"),
    "comm.mode": (
        lambda mode: mode != "default",
        "ranks that are simulated, or that torchcomms connects, have not been tested. Use default",
    ),
}
"""Fields of a config: whether a value is refused, and why."""

_TESTED_BACKEND = "partial_dtensor"


def require_supported_config(config: Any, options: Adaptive) -> None:
    """Check the settings of a trainer before anything is made."""
    for name, (is_refused, why) in REFUSED.items():
        value = attrgetter(name)(config)
        if is_refused(value):
            raise UsageError(f"{name}: {value!r} is not supported: {why}.")
    parallelism = config.parallelism
    if launcher.size() > 1 and parallelism.spmd_backend != _TESTED_BACKEND:
        raise UsageError(
            f"parallelism.spmd_backend: {parallelism.spmd_backend!r} has not been tested on several ranks. "
            f"Use {_TESTED_BACKEND!r} (--parallelism.spmd_backend {_TESTED_BACKEND})."
        )
    compiles = config.compile.enable and "model" in config.compile.components
    if compiles and parallelism.tensor_parallel_degree > 1:
        raise UsageError(
            "compile.enable: with tensor parallelism, compiled layers launch other collectives than those "
            "that were recorded, so a rank without memory could not complete them. Turn it off, or take "
            "'model' out of compile.components."
        )
    if options.dropout == "sample":
        raise UsageError(
            "dropout: by sample, but torchtitan's models drop nothing, so nobody has tested it. Leave it out."
        )
    if options.token_budget:
        raise UsageError("token_budget: rows of torchtitan have the same length. Leave it off.")


def require_known_trainer(trainer: Any) -> None:
    """Check that a step of the trainer divides into rows."""
    from torchtitan.trainer import Trainer

    own = trainer.forward_backward_step.__func__
    if own is not Trainer.forward_backward_step:
        raise UsageError(
            f"forward_backward_step: {own.__qualname__} is not known to give the same loss in other "
            "micro-batches. Use torchtitan.trainer.Trainer, or call torchtune_adaptive.AdaptiveStep in it."
        )


def require_supported(trainer: Any) -> None:
    """Check what a trainer has made."""
    from torchtitan.components.quantization.utils import has_quantization
    from torchtitan.models.common.moe import MoE

    dims = trainer.parallel_dims
    if dims.dp_replicate > 1 and dims.dp_shard == 1:
        raise UsageError(
            "parallelism.data_parallel_shard_degree: 1, so replicas are not sharded, and FSDP's modules do "
            "not reduce their gradients as usual. Use 2 or more, or data_parallel_replicate_degree 1."
        )
    model: nn.Module = trainer.model_parts[0]
    if any(isinstance(module, MoE) for module in model.modules()):
        raise UsageError(
            "model_spec: a mixture of experts counts the tokens of each expert in forward, and would count "
            "those of a lost step, too. Use a dense model."
        )
    if has_quantization(trainer.model_config):
        raise UsageError(
            "model_spec: quantized layers (float8, MX) have not been tested. Use a model without them."
        )
    if (count := len(trainer.optimizers.optimizers)) != 1:
        raise UsageError(
            f"optimizer.param_groups: {count} optimizers, and a search can try one. Use one for all "
            "parameters."
        )
