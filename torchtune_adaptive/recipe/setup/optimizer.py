"""The optimizer, the loss and the learning-rate schedule of a config."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtune import training
from torchtune.training import OptimizerInBackwardWrapper

from torchtune_adaptive.common import CheckpointError
from torchtune_adaptive.recipe.components import make
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.upstream import give_output_to_loss

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Optimizers:
    """The optimizer of a run, or one for each parameter where parameters step in backward."""

    steppers: tuple[Optimizer, ...]
    saved: Optimizer | OptimizerInBackwardWrapper
    """The object that checkpoints save and that carries the learning rate."""

    @property
    def in_backward(self) -> bool:
        return isinstance(self.saved, OptimizerInBackwardWrapper)


def build_optimizers(
    asked: Asked, environment: Environment, model: nn.Module, state: dict[str, Any] | None
) -> Optimizers:
    """The optimizer that the config asks for, with the state of a checkpoint if there is one."""
    if asked["optimizer_in_bwd"]:
        built = _optimizers_in_backward(asked, environment, model, state)
    else:
        optimizer = make(asked.cfg.optimizer, "optimizer", model.parameters())
        if state:
            _load_state(model, optimizer, state, environment)
        built = Optimizers((optimizer,), optimizer)
    log.info(
        "In-backward optimizers are set up." if built.in_backward else "Optimizer is initialized."
    )
    return built


def _optimizers_in_backward(
    asked: Asked, environment: Environment, model: nn.Module, state: dict[str, Any] | None
) -> Optimizers:
    by_parameter = {p: make(asked.cfg.optimizer, "optimizer", [p]) for p in model.parameters()}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=by_parameter)
    wrapper = training.create_optim_in_bwd_wrapper(model=model, optim_dict=by_parameter)
    if state is not None:
        unknown = sorted(set(state) - set(wrapper.optim_map))
        if unknown:
            raise CheckpointError(
                f"optimizer_in_bwd: the checkpoint's optimizer state has {unknown[0]!r}, which is no "
                "parameter, so it was saved without it. Resume with optimizer_in_bwd=False."
            )
        for name, parameter_state in state.items():
            _load_state(model, wrapper.optim_map[name], parameter_state, environment)
    return Optimizers(tuple(by_parameter.values()), wrapper)


def _load_state(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], environment: Environment
) -> None:
    """Give an optimizer the state that rank 0 has; nothing of it is the optimizer's afterwards.

    Where a parameter is not sharded, and for numbers such as ``step``, torch takes tensors over as they are.
    These may be parts of a mapped file, which would stay mapped until the end of the run. A parameter that
    had no gradient yet has no state, which torch accepts only of those that are not trained.
    """
    saved = {name for group in state["param_groups"] for name in group["params"]}
    without = saved - state["state"].keys()
    idle = [p for name, p in model.named_parameters() if name in without and p.requires_grad]
    for parameter in idle:
        parameter.requires_grad_(False)
    try:
        training.load_from_full_optimizer_state_dict(model, optimizer, state, environment.device)
    finally:
        for parameter in idle:
            parameter.requires_grad_(True)
    for values in optimizer.state.values():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                values[key] = _copied(value)


def _copied(value: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own. Quantized state cannot be cloned, but what it is made of can."""
    if not hasattr(value, "__tensor_flatten__"):
        return value.clone()
    names, _ = value.__tensor_flatten__()
    for name in names:
        setattr(value, name, getattr(value, name).clone())
    return value


def build_loss(
    asked: Asked, environment: Environment, model: nn.Module, block: str = "loss"
) -> nn.Module:
    """The loss that a block describes, and a model whose output comes in the chunks that the loss wants."""
    loss_fn = make(asked.cfg[block], block)
    if asked["compile"]:
        loss_fn = training.compile_loss(loss_fn, verbose=environment.ranks.is_zero)
    give_output_to_loss(loss_fn, model)
    log.debug("Loss is initialized.")
    return loss_fn


def build_lr_scheduler(
    asked: Asked, built: Optimizers, total_steps: int, steps_done: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The learning-rate schedule, if there is one, at the step where the run is."""
    if asked["lr_scheduler"] is None:
        log.info("No learning rate scheduler configured. Using constant learning rate.")
        return None
    optimizer = built.steppers[0]  # if there are more, all have the same learning rate
    for group in optimizer.param_groups if steps_done else ():
        # An asynchronous checkpoint lacks it.
        group.setdefault("initial_lr", optimizer.defaults["lr"])
    scheduler = make(
        asked.cfg.lr_scheduler,
        "lr_scheduler",
        optimizer,
        num_training_steps=total_steps,
        last_epoch=steps_done - 1,
    )
    if isinstance(built.saved, OptimizerInBackwardWrapper):
        built.saved.set_lr_scheduler(scheduler)
    log.debug("Learning rate scheduler is initialized.")
    return scheduler
