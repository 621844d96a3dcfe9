"""The models of a config: built, sharded, and with their weights."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torchtune import modules, training
from torchtune.modules.model_fusion import DeepFusionModel, FusionEmbedding, FusionLayer
from torchtune.modules.peft import (
    DoRALinear,
    LoRALinear,
    get_adapter_params,
    set_trainable_params,
    validate_missing_and_unexpected_for_lora,
)

from torchtune_adaptive.common import CheckpointError, ConfigError, UsageError
from torchtune_adaptive.core import sample_dropout
from torchtune_adaptive.recipe.components import make
from torchtune_adaptive.recipe.private import has_quantized_base, wait_for
from torchtune_adaptive.recipe.settings.adaptive import BLOCK
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.keys import COPIES, TENSORS
from torchtune_adaptive.recipe.settings.kind_table import FrozenModel
from torchtune_adaptive.recipe.setup.context_parallel import prepare_for_parts
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.meshes import model_meshes
from torchtune_adaptive.recipe.setup.model_switches import head_of
from torchtune_adaptive.recipe.setup.offloading import Offloading
from torchtune_adaptive.recipe.upstream import NF4Tensor, to_nf4

log = logging.getLogger(__name__)
Sharding = Callable[[], AbstractContextManager[Any]]
"""A context in which a model is sharded."""
AS_IT_IS: Sharding = nullcontext

_TRAINED = FrozenModel("model", "checkpointer")

Prepare = Callable[[nn.Module], nn.Module]
"""Changes a model before it is sharded, such as for quantization-aware training."""


@dataclass(frozen=True)
class Model:
    """A model that is ready to be trained, and how it is spread over the ranks."""

    module: nn.Module
    offloading: Offloading
    data_rank: int
    data_ranks: int
    """The share of the data that this rank gets, and of how many: with tensor parallelism, several ranks
    work on the same share."""


def full_model(
    asked: Asked,
    environment: Environment,
    prepare: Prepare,
    sharding: Sharding,
    block: str = "model",
) -> nn.Module:
    """A model of which every weight is trained, spread over the ranks, but still on the meta device.

    It is made of a block of the config, and sharded in a context in which tensors may not be what they seem.
    """
    data, tensors = model_meshes(asked, environment)
    model = _on_meta(asked, environment, block)
    if tensors.size() > 1:
        _split(model, asked, tensors)
    model = prepare(model)
    _drop_as_asked(model, asked, environment)
    with sharding():
        _shard(model, asked, data)
    if tensors.size() > 1 and data.size() > 1:
        _require_even_parts(model, asked)
    return model


def _split(model: nn.Module, asked: Asked, mesh: DeviceMesh) -> None:
    """Split layers over the ranks of a mesh, by the plan of a config.

    Raises:
        ConfigError: the heads of its attention cannot be divided by them.
    """
    try:
        training.prepare_mha_for_tp(model, mesh)
    except ValueError as error:
        reason = f"does not fit the model: {str(error).rstrip('.')}"
        raise ConfigError(TENSORS, mesh.size(), reason, "Use a number that divides it") from None
    plan = make(asked.cfg.tensor_parallel_plan, "tensor_parallel_plan")
    parallelize_module(model, mesh, parallelize_plan=plan)
    wait_for_logits(model)


def wait_for_logits(model: nn.Module) -> None:
    """Let a model whose last projection is split wait for its logits in each chunk.

    torch does it by itself, except for a chunk of one token of one row. While such chunks wait in a list for
    those after them, a failure would drop the list, and then nobody could wait for them (see
    ``core.step.failures``).
    """
    if (head := head_of(model)) is not None:
        head.register_forward_hook(lambda module, inputs, logits: wait_for(logits))


def _require_even_parts(model: nn.Module, asked: Asked) -> None:
    """Raise ``ConfigError``, naming a parameter, unless whatever FSDP splits where tensor parallelism has
    split it before comes out even: no others can be loaded (checked on torch 2.13)."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)  # FSDP has made it one
        split = [
            (each.dim, size)  # type: ignore[attr-defined]
            for each, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            if not each.is_replicate()
        ]
        for dim in {dim for dim, _ in split}:
            sizes = [size for of, size in split if of == dim]
            if len(sizes) > 1 and (length := parameter.shape[dim]) % prod(sizes):
                ways = " x ".join(map(str, sizes))
                reason = f"and FSDP split {name}, whose length is {length}, into {ways} parts of other sizes"
                remedy = f"Use numbers of ranks that divide {length}, or {TENSORS}=1"
                raise ConfigError(TENSORS, asked[TENSORS], reason, remedy)


def lora_model(
    asked: Asked, environment: Environment, prepare: Prepare, sharding: Sharding
) -> nn.Module:
    """A frozen model with adapters that are trained, on the meta device like ``full_model``."""
    model = _on_meta(asked, environment, "model", prepare)
    _drop_as_asked(model, asked, environment)
    if environment.ranks.size > 1:
        _require_shardable(model, asked)
    set_trainable_params(model, get_adapter_params(model))
    data, _ = model_meshes(asked, environment)
    with sharding():
        _shard(model, asked, data)
    return model


def _require_shardable(model: nn.Module, asked: Asked) -> None:
    """Raise ``ConfigError`` for quantized models that cannot be loaded once they are sharded. DoRA adds
    adapters to weights, to take their norms, and torchao cannot add to sharded NF4 weights; torchtune cannot
    copy shards of them."""
    quantized = [each for each in _adapted_layers(model) if has_quantized_base(each)]
    if quantized and (copies := asked[COPIES]) > 1:
        reason = "cannot be combined with a quantized base: torchtune shards NF4 weights over all ranks only"
        raise ConfigError(COPIES, copies, reason, "Set it to 1, or model.quantize_base to False")
    if any(isinstance(each, DoRALinear) for each in quantized):
        raise ConfigError(
            "model.use_dora",
            True,
            "cannot be combined with a quantized base on several ranks: torchao cannot add to sharded NF4 "
            "weights",
            "Set it to False, or model.quantize_base to False, or use one rank",
        )


def frozen_model(
    asked: Asked, environment: Environment, block: str, sharding: Sharding
) -> nn.Module:
    """A model that is used and not trained, by its block of the config, on the meta device as well."""
    model = _on_meta(asked, environment, block).requires_grad_(False).eval()
    mesh = init_device_mesh(environment.device.type, (environment.ranks.size,))
    with sharding():
        # Always: parameters that were kept after forward would stay forever, as no backward frees them.
        _shard(model, asked, mesh, reshard_after_forward=True)
    return model


def load_full(
    model: nn.Module,
    asked: Asked,
    environment: Environment,
    weights: dict[str, Any] | None,
    keys: FrozenModel = _TRAINED,
) -> None:
    """Give a model all its weights, or room for them; ``keys`` are those of its block and of its
    checkpointer's."""
    if weights is None:
        model.to_empty(device="cpu" if asked["fsdp_cpu_offload"] else environment.device)
    initialize_ropes(model, environment)
    if weights is not None:
        _load(model, asked, environment, weights, keys, strict=True)


def load_lora(
    model: nn.Module,
    asked: Asked,
    environment: Environment,
    weights: dict[str, Any],
    adapter_weights: dict[str, Any] | None,
) -> None:
    """Give a model with adapters its weights; without those of a checkpoint, adapters are new ones."""
    missing, unexpected = None, None
    if adapter_weights:
        missing, unexpected = _load(model, asked, environment, adapter_weights)
    else:
        _initialize_adapters(model, asked, environment)
    initialize_ropes(model, environment)
    base_missing, base_unexpected = _load(model, asked, environment, weights)
    if not adapter_weights:  # or magnitudes that have been trained would be lost
        for module in model.modules():
            if isinstance(module, DoRALinear):
                module.initialize_dora_magnitude()
    try:
        validate_missing_and_unexpected_for_lora(
            lora_attn_modules=list(asked.cfg.model.lora_attn_modules),
            apply_lora_to_mlp=asked.cfg.model.apply_lora_to_mlp,
            apply_lora_to_output=asked.cfg.model.get("apply_lora_to_output", False),
            base_missing=base_missing,
            base_unexpected=base_unexpected,
            lora_missing=missing,
            lora_unexpected=unexpected,
        )
    except AssertionError as error:
        raise CheckpointError(
            f"The checkpoint does not fit the model: {error}. Look at the LoRA settings of model."
        ) from error


def _on_meta(
    asked: Asked, environment: Environment, block: str, prepare: Prepare = lambda model: model
) -> nn.Module:
    """The model of a block without memory: each rank will only ever hold its part."""
    with training.set_default_dtype(environment.dtype), torch.device("meta"):
        model = make(asked.cfg[block], block)
        environment.shorten(model)
        model = prepare(model)
    if environment.context:
        prepare_for_parts(model, environment.context.parts)
    if asked["compile"]:
        _compile(model)
    return model


def _compile(model: nn.Module) -> None:
    """Compile the layers that torchtune compiles: their forward passes, without the hooks around them. What
    switches checkpointing is then outside (see ``core.step.recompute``), as torchtune's wrapper is."""
    backend = compile_backend()
    decoder = model.decoder if isinstance(model, DeepFusionModel) else model
    layers = (modules.TransformerSelfAttentionLayer, modules.TransformerCrossAttentionLayer)
    for layer in decoder.modules():
        if isinstance(layer, layers):
            layer.forward = torch.compile(layer.forward, backend=backend)


def compile_backend() -> str:
    """The backend for ``torch.compile``, as torchtune chooses it."""
    return os.environ.get("TORCH_COMPILE_BACKEND", "inductor")


def _drop_as_asked(model: nn.Module, asked: Asked, environment: Environment) -> None:
    """Let the dropout of a model that is trained follow the samples, if that is asked for."""
    if asked.settings.dropout == "torch":
        return
    try:
        sample_dropout.drop_by_sample(model, compiled=environment.device.type != "cpu")
    except UsageError as error:
        reason = f"does not work with {str(error).rstrip('.')}"
        remedy = "Set it to torch, or the other to 0"
        raise ConfigError(f"{BLOCK}.dropout", "sample", reason, remedy) from None


def _shard(
    model: nn.Module, asked: Asked, mesh: DeviceMesh, reshard_after_forward: bool | None = None
) -> None:
    offloads = asked["fsdp_cpu_offload"]
    if mesh.size() == 1 and not offloads:
        return  # FSDP would only make copies, and on a single rank it cannot hold quantized parameters
    names = asked["custom_sharded_layers"]
    if reshard_after_forward is None:
        reshard_after_forward = asked["fsdp_reshard_after_forward"]
    training.shard_model(
        model=model,
        shard_conditions=[partial(training.get_shard_conditions, names_to_match=names)],
        cpu_offload=offloads,
        reshard_after_forward=reshard_after_forward,
        dp_mesh=mesh,
    )


def _load(
    model: nn.Module,
    asked: Asked,
    environment: Environment,
    weights: dict[str, Any],
    keys: FrozenModel = _TRAINED,
    strict: bool = False,
) -> Any:
    if any(isinstance(parameter, NF4Tensor) for parameter in model.parameters()):
        return _load_quantized(model, environment, weights)
    _require_fitting(model, weights, keys, strict)
    return training.load_from_full_model_state_dict(
        model, weights, environment.device, strict=strict, cpu_offload=asked["fsdp_cpu_offload"]
    )


def _require_fitting(
    model: nn.Module, weights: dict[str, Any], keys: FrozenModel, strict: bool
) -> None:
    """Raise ``CheckpointError``, naming a weight, unless the weights are those of this model: before anything
    is loaded."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    actual = {name: tuple(value.shape) for name, value in weights.items()}
    missing = sorted(expected.keys() - actual.keys()) if strict else []
    wrong = sorted(name for name, shape in actual.items() if expected.get(name) != shape)
    if not missing and not wrong:
        return
    name = (missing + wrong)[0]
    raise CheckpointError(
        f"The checkpoint does not fit the model: {name} is {actual.get(name, 'missing')} in the checkpoint "
        f"and {expected.get(name, 'missing')} in the model. Look at {keys.model}, "
        f"{keys.checkpointer}.checkpoint_dir, .checkpoint_files and .model_type."
    )


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters as they are, by the names of checkpoints; a state dict would dequantize them."""
    # What a fusion adds to a pretrained layer has names of its own; the layer keeps those that it had.
    fused = {}
    for name, module in model.named_modules():
        if isinstance(module, (FusionLayer, FusionEmbedding)):
            inside = "layer" if isinstance(module, FusionLayer) else "embedding"
            fused[f"{name}.{inside}."] = f"{name}."
    by_name = {}
    for name, value in model.named_parameters():
        prefix = next((prefix for prefix in fused if name.startswith(prefix)), "")
        by_name[fused.get(prefix, "") + name.removeprefix(prefix)] = value
    return by_name


def _load_quantized(model: nn.Module, environment: Environment, weights: dict[str, Any]) -> Any:
    """torchtune's loading knows quantized parameters only when they are sharded, which on one rank they
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


def _initialize_adapters(model: nn.Module, asked: Asked, environment: Environment) -> None:
    offloads = asked["fsdp_cpu_offload"]
    alone = not environment.launched and not offloads
    with training.set_default_dtype(environment.dtype), environment.device:
        # torchtune's single-device recipe draws adapters in turn with the weights that a checkpoint then
        # replaces, its distributed one without them. Each is followed, so that both give their results; the
        # first takes the memory of a whole model for a moment.
        drawn = _adapted_layers(make(asked.cfg.model, "model")) if alone else []
        for number, module in enumerate(_adapted_layers(model)):
            module.to_empty(device="cpu" if offloads else environment.device)
            if not alone:
                module.initialize_parameters()
                continue
            for name in module.adapter_params():
                module.get_parameter(name).data.copy_(drawn[number].get_parameter(name))
    for module in _adapted_layers(model):
        for name in module.adapter_params():
            _as_in_first_copy(module.get_parameter(name))


def _as_in_first_copy(parameter: nn.Parameter) -> None:
    """Give a parameter the values that it has in the first copy of the model, where there are several (HSDP):
    what ranks draw by themselves would differ, and nothing would ever make it the same."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
        copies = parameter.device_mesh.get_group(0)
        dist.broadcast(parameter.to_local().detach(), group=copies, group_src=0)


def _adapted_layers(model: nn.Module) -> list[LoRALinear | DoRALinear]:
    return [module for module in model.modules() if isinstance(module, (LoRALinear, DoRALinear))]


def initialize_ropes(model: nn.Module, environment: Environment) -> None:
    """Compute what no checkpoint has."""
    with training.set_default_dtype(environment.dtype), environment.device:
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()  # type: ignore[operator]


def announce(model: nn.Module, environment: Environment, started: float) -> None:
    """The model has its weights, on all ranks."""
    training.validate_no_params_on_meta_device(model)
    log.info(
        f"Instantiating model and loading checkpoint took {time.perf_counter() - started:.2f} secs"
    )
    on_cpu = environment.device.type == "cpu"
    if environment.ranks.is_zero and not on_cpu:
        training.log_memory_stats(training.get_memory_stats(device=environment.device))
    # Before its first collective, NCCL would guess the device from the rank among all machines.
    dist.barrier(device_ids=None if on_cpu else [torch.accelerator.current_device_index()])
