"""From a config to the objects of a run, out of torchtune's public parts.

What torchtune keeps private and its own recipes use, these recipes use as well: the checkpoint client and
the lookup of a function by its path (torchtune 0.6.1, the version that is pinned).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune import config, modules, training, utils
from torchtune.config._utils import _get_component_from_path
from torchtune.data import padded_collate_packed
from torchtune.datasets import ConcatDataset
from torchtune.modules.peft import (
    DoRALinear,
    LoRALinear,
    get_adapter_params,
    set_trainable_params,
    validate_missing_and_unexpected_for_lora,
)
from torchtune.training import OptimizerInBackwardWrapper
from torchtune.training.activations import apply_selective_activation_checkpointing

from torchtune_adaptive.config import AdaptiveSettings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.schedule import GradientNoise, IncreaseFunction, Schedule

log = logging.getLogger(__name__)

_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class Environment:
    """Where a rank runs."""

    device: torch.device
    dtype: torch.dtype
    rank: int
    ranks: int

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0


def start(cfg: DictConfig) -> Environment:
    """Join the other ranks; alone, without a launcher, be the only one."""
    _log_on_rank_zero()
    device = utils.get_device(cfg.device)
    dtype = training.get_dtype(cfg.dtype, device)
    on_cpu_too = cfg.get("fsdp_cpu_offload", False) or cfg.get("enable_async_checkpointing", False)
    backend = training.get_distributed_backend(
        cfg.device, offload_ops_to_cpu=on_cpu_too and device.type != "cpu"
    )
    if training.is_distributed():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if cfg.get("fsdp_cpu_offload", False):
        training.set_torch_num_threads()  # the optimizer runs on the CPU
    return Environment(device, dtype, dist.get_rank(), dist.get_world_size())


def _log_on_rank_zero() -> None:
    """Our messages, once: what we say on every rank, the others only say when it is a warning."""
    ours = logging.getLogger("torchtune_adaptive")
    ours.setLevel(logging.INFO if int(os.environ.get("RANK", 0)) == 0 else logging.WARNING)
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
    ours.propagate = False


# --- model ----------------------------------------------------------------------------------------


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
    sharding: AbstractContextManager[Any] = _AS_IT_IS,
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
    validate_missing_and_unexpected_for_lora(
        lora_attn_modules=list(cfg.model.lora_attn_modules),
        apply_lora_to_mlp=cfg.model.apply_lora_to_mlp,
        apply_lora_to_output=cfg.model.get("apply_lora_to_output", False),
        base_missing=base_missing,
        base_unexpected=base_unexpected,
        lora_missing=missing,
        lora_unexpected=unexpected,
    )
    activations = _finish(model, cfg, environment, started)
    return Model(model, activations, environment.rank, environment.ranks)


def lora_model_without_weights(
    cfg: DictConfig,
    environment: Environment,
    sharding: AbstractContextManager[Any] = _AS_IT_IS,
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
    return training.load_from_full_model_state_dict(
        model,
        weights,
        environment.device,
        strict=strict,
        cpu_offload=cfg.get("fsdp_cpu_offload", False),
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
    training.validate_no_params_on_meta_device(model)
    log.info(
        f"Instantiating model and loading checkpoint took {time.perf_counter() - started:.2f} secs"
    )
    if environment.is_rank_zero and environment.device.type != "cpu":
        training.log_memory_stats(training.get_memory_stats(device=environment.device))
    dist.barrier()
    return activations


# --- optimizer, loss, schedule ----------------------------------------------------------------------


@dataclass(frozen=True)
class Optimizers:
    """What steps the parameters: one optimizer, or one for each parameter that steps in backward."""

    steppers: tuple[Optimizer, ...]
    saved: Optimizer | OptimizerInBackwardWrapper
    """What checkpoints hold, and what knows the learning rate."""

    @property
    def in_backward(self) -> bool:
        return isinstance(self.saved, OptimizerInBackwardWrapper)


def optimizers(
    cfg: DictConfig, environment: Environment, model: nn.Module, state: dict[str, Any] | None
) -> Optimizers:
    """The optimizer that the config asks for, with the state of a checkpoint if there is one."""
    if cfg.get("optimizer_in_bwd", False):
        built = _optimizers_in_backward(cfg, environment, model, state)
    else:
        optimizer = config.instantiate(cfg.optimizer, model.parameters())
        if state:
            training.load_from_full_optimizer_state_dict(
                model, optimizer, state, environment.device
            )
        built = Optimizers((optimizer,), optimizer)
    log.info(
        "In-backward optimizers are set up." if built.in_backward else "Optimizer is initialized."
    )
    return built


def _optimizers_in_backward(
    cfg: DictConfig, environment: Environment, model: nn.Module, state: dict[str, Any] | None
) -> Optimizers:
    by_parameter = {p: config.instantiate(cfg.optimizer, [p]) for p in model.parameters()}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=by_parameter)
    wrapper = training.create_optim_in_bwd_wrapper(model=model, optim_dict=by_parameter)
    if state is not None:
        unknown = sorted(set(state) - set(wrapper.optim_map))
        if unknown:
            raise ValueError(
                f"The checkpoint's optimizer state has {unknown[0]!r}, which is not a parameter: it was "
                "saved without optimizer_in_bwd. Resume with the same setting."
            )
        for name, parameter_state in state.items():
            training.load_from_full_optimizer_state_dict(
                model, wrapper.optim_map[name], parameter_state, environment.device
            )
    return Optimizers(tuple(by_parameter.values()), wrapper)


def loss(cfg: DictConfig, environment: Environment, model: nn.Module) -> nn.Module:
    """The loss, and a model that gives its output in the chunks that the loss wants."""
    loss_fn = config.instantiate(cfg.loss)
    if cfg.get("compile", False):
        loss_fn = training.compile_loss(loss_fn, verbose=environment.is_rank_zero)
    if hasattr(loss_fn, "num_output_chunks"):
        model.set_num_output_chunks(loss_fn.num_output_chunks)  # type: ignore[operator]
    log.info("Loss is initialized.")
    return loss_fn


def lr_scheduler(
    cfg: DictConfig, built: Optimizers, total_steps: int, steps_done: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The learning-rate schedule, if there is one, at the step where the run is."""
    if cfg.get("lr_scheduler", None) is None:
        log.info("No learning rate scheduler configured. Using constant learning rate.")
        return None
    optimizer = built.steppers[0]  # if there are more, all have the same learning rate
    for group in optimizer.param_groups if steps_done else ():
        group.setdefault(
            "initial_lr", optimizer.defaults["lr"]
        )  # an asynchronous checkpoint lacks it
    scheduler = config.instantiate(
        cfg.lr_scheduler,
        optimizer,
        num_training_steps=total_steps,
        last_epoch=steps_done - 1,
    )
    if isinstance(built.saved, OptimizerInBackwardWrapper):
        built.saved.set_lr_scheduler(scheduler)
    log.info("Learning rate scheduler is initialized.")
    return scheduler


def batch_increase(
    cfg: DictConfig, settings: AdaptiveSettings
) -> Schedule | IncreaseFunction | None:
    """What makes the batch grow: a function, or a component that is a schedule or gives a function."""
    node = cfg.get("batch_increase_function")
    if settings.gradient_noise == "act":
        return GradientNoise()
    if node is None:
        return None
    try:
        built = function(node) if isinstance(node, str) else _instantiate(node)
    except Exception as error:
        raise ConfigError(
            "batch_increase_function",
            node if isinstance(node, str) else OmegaConf.to_container(node),
            f"cannot be made: {type(error).__name__}: {error}",
            "Give the dotted path of a function, or a _component_ with what it takes",
        ) from error
    if not isinstance(built, Schedule) and not callable(built):
        raise ConfigError(
            "batch_increase_function",
            str(node),
            f"gives a {type(built).__name__}, which cannot be called",
            "Give the dotted path of a function f(epoch, current_batch_size), or one of the schedules",
        )
    return built


def _instantiate(node: DictConfig) -> Any:
    """As torchtune does, but modules in the working directory count."""
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    component = function(values.pop("_component_"))
    return component(**{str(key): value for key, value in values.items()})


# --- data -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """What is trained on, and how rows become a batch."""

    dataset: Any
    tokenizer: Any
    collate: Callable[[list[Any]], dict[str, Any]]
    packed: bool


def data(cfg: DictConfig, tokenizer: Any, loss_fn: Any) -> Data:
    """The dataset, or several in one."""
    if isinstance(cfg.dataset, ListConfig):
        dataset = ConcatDataset([config.instantiate(one, tokenizer) for one in cfg.dataset])
        packed = getattr(dataset, "packed", False)
    else:
        dataset = config.instantiate(cfg.dataset, tokenizer)
        packed = cfg.dataset.get("packed", False)
    if packed:
        collate = padded_collate_packed
    else:
        collate = partial(
            function(cfg.get("collate_fn", "torchtune.data.padded_collate_sft")),
            padding_idx=tokenizer.pad_id,
            ignore_idx=loss_fn.ignore_index,
        )
        chunks = getattr(loss_fn, "num_output_chunks", 1)
        if chunks > 1 and "output" in (cfg.get("custom_sharded_layers", None) or []):
            collate = partial(
                _collate_in_chunks, collate, chunks, tokenizer.pad_id, loss_fn.ignore_index
            )
    return Data(dataset, tokenizer, collate, packed)


def _collate_in_chunks(
    collate: Callable[[list[Any]], dict[str, Any]],
    chunks: int,
    padding: int,
    ignored: int,
    rows: list[Any],
) -> dict[str, Any]:
    """A batch long enough to be cut into as many chunks as the loss wants.

    The output layer runs once for each chunk and, sharded by itself, gathers its weights each time. Short
    batches give fewer chunks, so ranks with batches of other lengths would wait for each other for ever.
    """
    batch = collate(rows)
    missing = chunks * (chunks - 1) + 1 - batch["tokens"].shape[-1]
    if missing > 0:
        batch["tokens"] = F.pad(batch["tokens"], (0, missing), value=padding)
        batch["labels"] = F.pad(batch["labels"], (0, missing), value=ignored)
    return batch


def function(path: str) -> Callable[..., Any]:
    """A function by its dotted path; modules in the working directory count."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return _get_component_from_path(path)


def profiler(cfg: DictConfig) -> tuple[Any, DictConfig]:
    """torchtune's profiler and its settings; without settings, one that does nothing."""
    component = "torchtune.training.setup_torch_profiler"
    node = cfg.get(training.PROFILER_KEY, None) or OmegaConf.create({"enabled": False})
    if node.setdefault("_component_", component) != component:
        raise ValueError(
            f"profiler._component_ is {node._component_}; only {component} is supported"
        )
    built, settings = config.instantiate(node)
    log.info(f" Profiler config after instantiation: {settings}")
    return built, settings
