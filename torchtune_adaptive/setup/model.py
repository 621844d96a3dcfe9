"""From a config to the objects of a run, out of torchtune's public parts.

What torchtune keeps private and its own recipes use, these recipes use as well: the checkpoint client and
the lookup of a function by its path (torchtune 0.6.1, the version that is pinned).
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune import config, modules, training
from torchtune.modules.peft import (
    DoRALinear,
    LoRALinear,
    get_adapter_params,
    set_trainable_params,
    validate_missing_and_unexpected_for_lora,
)
from torchtune.training.activations import apply_selective_activation_checkpointing

from torchtune_adaptive.device.host import bound_by_host_memory
from torchtune_adaptive.errors import CheckpointError
from torchtune_adaptive.setup.environment import Environment

log = logging.getLogger(__name__)
AS_IT_IS: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class Model:
    """A model that is ready to be trained, and how it is spread over the ranks."""

    module: nn.Module
    activations: AbstractContextManager[Any]
    data_rank: int
    data_ranks: int
    """Which share of the data this rank gets, and of how many: with tensor parallelism, several ranks
    work on the same share."""


def full_model(cfg: DictConfig, environment: Environment, weights: dict[str, Any]) -> Model:
    """A model of which every weight is trained."""
    started = time.perf_counter()
    model, mesh = full_model_without_weights(cfg, environment)
    initialize_ropes(model, environment)
    _load(model, cfg, environment, weights, strict=True)
    activations = _finish(model, cfg, environment, started)
    return Model(model, activations, mesh["dp"].get_local_rank(), mesh["dp"].size())


def full_model_without_weights(
    cfg: DictConfig,
    environment: Environment,
    sharding: AbstractContextManager[Any] = AS_IT_IS,
) -> tuple[nn.Module, DeviceMesh]:
    """The same model as it is spread over the ranks, but still on the meta device.

    Args:
        cfg: the config.
        environment: where the rank runs.
        sharding: what the model is sharded in, where tensors are not what they seem.
    """
    tensor_ranks = cfg.get("tensor_parallel_dim", 1)
    if environment.ranks % tensor_ranks != 0:
        raise ValueError(
            f"tensor_parallel_dim {tensor_ranks} does not divide the {environment.ranks} ranks of this run"
        )
    data_ranks = environment.ranks // tensor_ranks
    model = _on_meta(cfg.model, environment)
    if cfg.get("compile", False):
        training.compile_model(model, verbose=environment.is_rank_zero)
    mesh = init_device_mesh(
        environment.device.type, (data_ranks, tensor_ranks), mesh_dim_names=("dp", "tp")
    )
    if tensor_ranks > 1:
        model = training.prepare_mha_for_tp(model, mesh["tp"])
        plan = config.instantiate(cfg.tensor_parallel_plan)
        parallelize_module(model, mesh["tp"], parallelize_plan=plan)

    ac_mode = cfg.get("ac_mode", None)
    checkpointing = cfg.get("enable_activation_checkpointing", False)
    if checkpointing and ac_mode is None:
        _checkpoint_activations(model)
    elif not checkpointing and ac_mode is not None:
        apply_selective_activation_checkpointing(model, ac_mode, cfg.get("ac_option", None))

    with sharding:
        _shard(model, cfg, mesh["dp"])
    return model, mesh


def lora_model(
    cfg: DictConfig,
    environment: Environment,
    weights: dict[str, Any],
    adapter_weights: dict[str, Any] | None,
) -> Model:
    """A frozen model with adapters that are trained: new ones, or those of a checkpoint."""
    started = time.perf_counter()
    model = lora_model_without_weights(cfg, environment)
    missing, unexpected = None, None
    if adapter_weights:
        missing, unexpected = _load(model, cfg, environment, adapter_weights)
    else:
        _initialize_adapters(model, cfg, environment)
    initialize_ropes(model, environment)
    base_missing, base_unexpected = _load(model, cfg, environment, weights)
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()  # type: ignore[operator]
    try:
        validate_missing_and_unexpected_for_lora(
            lora_attn_modules=list(cfg.model.lora_attn_modules),
            apply_lora_to_mlp=cfg.model.apply_lora_to_mlp,
            apply_lora_to_output=cfg.model.get("apply_lora_to_output", False),
            base_missing=base_missing,
            base_unexpected=base_unexpected,
            lora_missing=missing,
            lora_unexpected=unexpected,
        )
    except AssertionError as error:
        raise CheckpointError(
            f"The checkpoint does not fit the model: {error}. Look at the LoRA settings of model."
        ) from error
    activations = _finish(model, cfg, environment, started)
    return Model(model, activations, environment.rank, environment.ranks)


def lora_model_without_weights(
    cfg: DictConfig,
    environment: Environment,
    sharding: AbstractContextManager[Any] = AS_IT_IS,
) -> nn.Module:
    """The same model as it is spread over the ranks, but still on the meta device."""
    model = _on_meta(cfg.model, environment)
    set_trainable_params(model, get_adapter_params(model))
    if cfg.get("compile", False):
        training.compile_model(model, verbose=environment.is_rank_zero)
    if cfg.get("enable_activation_checkpointing", False):
        _checkpoint_activations(model)
    mesh = init_device_mesh(environment.device.type, (environment.ranks,))
    with sharding:
        _shard(model, cfg, mesh)
    return model


def _on_meta(cfg_model: DictConfig, environment: Environment) -> nn.Module:
    """The model without memory: each rank will only ever hold its part."""
    with training.set_default_dtype(environment.dtype), torch.device("meta"):
        return config.instantiate(cfg_model)


def _checkpoint_activations(model: nn.Module) -> None:
    training.set_activation_checkpointing(
        model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
    )


def _shard(model: nn.Module, cfg: DictConfig, mesh: DeviceMesh) -> None:
    offloads = cfg.get("fsdp_cpu_offload", False)
    if mesh.size() == 1 and not offloads:
        return  # FSDP would only make copies, and on a single rank it cannot hold quantised parameters
    names = cfg.get("custom_sharded_layers", None)
    training.shard_model(
        model=model,
        shard_conditions=[partial(training.get_shard_conditions, names_to_match=names)],
        cpu_offload=offloads,
        reshard_after_forward=cfg.get("fsdp_reshard_after_forward", True),
        dp_mesh=mesh,
    )


def _load(
    model: nn.Module,
    cfg: DictConfig,
    environment: Environment,
    weights: dict[str, Any],
    strict: bool = False,
) -> Any:
    if any(isinstance(parameter, NF4Tensor) for parameter in model.parameters()):
        return _load_quantised(model, environment, weights)
    _require_fitting(model, weights, strict)
    return training.load_from_full_model_state_dict(
        model,
        weights,
        environment.device,
        strict=strict,
        cpu_offload=cfg.get("fsdp_cpu_offload", False),
    )


def _require_fitting(model: nn.Module, weights: dict[str, Any], strict: bool) -> None:
    """Raise before anything is loaded, unless the weights are those of this model.

    Raises:
        CheckpointError: naming one that is not.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    actual = {name: tuple(value.shape) for name, value in weights.items()}
    missing = sorted(expected.keys() - actual.keys()) if strict else []
    wrong = sorted(name for name, shape in actual.items() if expected.get(name) != shape)
    if not missing and not wrong:
        return
    name = (missing + wrong)[0]
    raise CheckpointError(
        f"The checkpoint does not fit the model: {name} is {actual.get(name, 'missing')} in the checkpoint "
        f"and {expected.get(name, 'missing')} in the model. Look at model, checkpointer.checkpoint_dir and "
        "checkpointer.model_type."
    )


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters as they are, by the names of checkpoints; a state dict would dequantise them."""
    # Part of the names of layers that torch checkpoints; private (checked on torch 2.11, 2.13 and 2.15).
    wrapped = "_checkpoint_wrapped_module."
    return {name.replace(wrapped, ""): value for name, value in model.named_parameters()}


def _load_quantised(model: nn.Module, environment: Environment, weights: dict[str, Any]) -> Any:
    """torchtune's loading knows quantised parameters only when they are sharded, which on one rank they
    are not."""
    parameters = parameters_by_name(model)
    loaded = {}
    for name, weight in weights.items():
        like = parameters.get(name)
        if like is not None:  # or else it is reported as unexpected
            weight = weight.to(environment.device, like.dtype)
            if isinstance(like, NF4Tensor):
                weight = to_nf4(weight, like.block_size, like.scaler_block_size)
            weight = nn.Parameter(weight, requires_grad=like.requires_grad)
        loaded[name] = weight
    return model.load_state_dict(loaded, strict=False, assign=True)


def _initialize_adapters(model: nn.Module, cfg: DictConfig, environment: Environment) -> None:
    device = "cpu" if cfg.get("fsdp_cpu_offload", False) else environment.device
    with training.set_default_dtype(environment.dtype), environment.device:
        for module in model.modules():
            if isinstance(module, (LoRALinear, DoRALinear)):
                module.to_empty(device=device)
                module.initialize_parameters()


def initialize_ropes(model: nn.Module, environment: Environment) -> None:
    """Compute what no checkpoint has."""
    with training.set_default_dtype(environment.dtype), environment.device:
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()  # type: ignore[operator]


def _finish(
    model: nn.Module, cfg: DictConfig, environment: Environment, started: float
) -> AbstractContextManager[Any]:
    activations = training.get_act_offloading_ctx_manager(
        model, cfg.get("enable_activation_offloading", False)
    )
    if isinstance(activations, training.OffloadActivations):
        bound_by_host_memory(activations)
    training.validate_no_params_on_meta_device(model)
    log.info(
        f"Instantiating model and loading checkpoint took {time.perf_counter() - started:.2f} secs"
    )
    if environment.is_rank_zero and environment.device.type != "cpu":
        training.log_memory_stats(training.get_memory_stats(device=environment.device))
    dist.barrier()
    return activations
