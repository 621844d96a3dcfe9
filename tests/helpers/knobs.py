"""A model with all memory knobs, trained for some steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training

from tests.helpers.decoder import adamw, batch, local_values, same_bits
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.step.knobs import Choice
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.core.step.train_step import StepOptions, TrainStep
from torchtune_adaptive.recipe.kinds.by_name import recipe_kind
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.model_switches import build_switches
from torchtune_adaptive.recipe.tracing.self_check import SMALL_RUN

SIZE = {"vocab_size": 16, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 8}
SIZE |= {"intermediate_dim": 12, "max_seq_len": 32}
ADAPTERS = {"lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": True}
ADAPTERS |= {"lora_rank": 2, "lora_alpha": 4}
STEPS = 2


def config_of(kind: str, dtype: str, dropout: float, **keys: Any) -> DictConfig:
    cfg = OmegaConf.create(copy.deepcopy(SMALL_RUN))
    cfg.update({"dtype": dtype, "batch_size": 2, "enable_activation_checkpointing": False})
    cfg.loss.num_output_chunks = 3
    cfg.model = {"_component_": "torchtune.models.llama2.llama2", **SIZE, "attn_dropout": dropout}
    if kind == "lora":
        cfg.model = {"_component_": "torchtune.models.llama2.lora_llama2", **SIZE, **ADAPTERS}
        cfg.model.lora_dropout = dropout
    for key, value in keys.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return cfg


class Training:
    """A step as a run builds it from a config, taken again and again from the same start."""

    def __init__(self, cfg: DictConfig, memory: SimulatedMemory | None = None) -> None:
        self.ranks = Ranks(timeout=200)
        dtype = training.get_dtype(cfg.dtype, torch.device("cpu"))
        environment = Environment(torch.device("cpu"), dtype, self.ranks)
        torch.manual_seed(0)
        with training.set_default_dtype(dtype):
            whole = config.instantiate(cfg.model)
        for parameter in whole.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        weights = whole.state_dict()
        adapters = {name: value for name, value in weights.items() if "lora" in name}
        base = {name: value for name, value in weights.items() if name not in adapters}
        checkpoint = {training.MODEL_KEY: base, training.ADAPTER_KEY: adapters or None}
        asked = Asked.of(cfg)
        recipe = recipe_kind(asked, environment)
        model = recipe.model(checkpoint)
        objective = recipe.objective(model.module, ())
        optimizer = adamw(model.module)
        self.step = TrainStep(
            model=model.module,
            objective=objective,
            optimizers=[optimizer],
            device=environment.device,
            memory=memory or SimulatedMemory(None),
            ranks=self.ranks,
            options=StepOptions(
                activations=model.offloading,
                clip_grad_norm=1.0,
                switches=build_switches(
                    asked, environment, model.module, objective, model.offloading
                ),
            ),
        )
        model.module.train()
        self.snapshot = Snapshot(model.module, [optimizer], environment.device)

    def train(self, choice: Choice | None = None) -> tuple[list[float], list[torch.Tensor]]:
        """Losses and weights of some steps, each of two micro-batches; then all is as before."""
        if choice is not None:
            self.step.switch(choice)
        losses = []
        for number in range(STEPS):
            for micro_batch in range(2):
                seed = 10 * number + micro_batch + 100 * self.ranks.rank
                self.step.forward_backward(batch(length=10, seed=seed))
            losses.append(self.step.apply().loss)
        weights = local_values(self.step.model)
        self.snapshot.close()
        return losses, weights


def differs(some: Any, others: Any) -> bool:
    return some[0] != others[0] or not same_bits(some[1], others[1])
