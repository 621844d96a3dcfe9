"""Models, batches and steps as small as they can be while being the real thing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torchtune import modules, training
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.modules.loss import CEWithChunkedOutputLoss, ForwardKLWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from torchtune.training.quantization import Int8DynActInt4WeightQATQuantizer

from tests.helpers import decoder
from tests.helpers.decoder import VOCABULARY
from tests.helpers.ranks import Alone
from torchtune_adaptive.core.step.knobs import CHUNKED, Switches
from torchtune_adaptive.core.step.objective import NextTokenPrediction, Objective
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.kinds.kd import Distillation
from torchtune_adaptive.recipe.kinds.quantization import quantized as fake_quantised
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.model_switches import build_switches


def tiny_llama(
    *,
    lora: bool = False,
    checkpointing: bool = False,
    sharded: bool = True,
    layers: int = 1,
    reshard: bool = True,
    output_apart: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
    quantised: bool = False,
) -> nn.Module:
    """A Llama with random weights, as the recipes build one: the same on every rank, then sharded."""
    torch.manual_seed(seed)
    size = {
        "vocab_size": VOCABULARY,
        "num_layers": layers,
        "num_heads": 2,
        "num_kv_heads": 1,
        "embed_dim": 8,
        "intermediate_dim": 12,
        "max_seq_len": 32,
    }
    if lora:
        model = lora_llama2(
            lora_attn_modules=["q_proj", "v_proj"],
            lora_rank=2,
            lora_alpha=4,
            lora_dropout=dropout,
            **size,
        )
        set_trainable_params(model, get_adapter_params(model))
    else:
        model = llama2(attn_dropout=dropout, **size)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    if checkpointing:
        training.set_activation_checkpointing(
            model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
        )
    if quantised:
        quantizer = Int8DynActInt4WeightQATQuantizer(groupsize=4)
        model = fake_quantised(OmegaConf.create(), quantizer.prepare(model))
    if sharded:
        training.shard_model(
            model,
            [
                partial(
                    training.get_shard_conditions,
                    names_to_match=["tok_embeddings", "output"] if output_apart else None,
                )
            ],
            cpu_offload=False,
            reshard_after_forward=reshard,
        )
    model.set_num_output_chunks(2)
    return model


def train_step(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], **settings: Any
) -> TrainStep:
    """A step of torchtune's model, with torchtune's loss unless another objective is given."""
    chunked = NextTokenPrediction(CEWithChunkedOutputLoss(num_output_chunks=2))
    return decoder.train_step(model, optimizers, **{"objective": chunked, **settings})


def switches_of(model: nn.Module, objective: Objective) -> Switches:
    """The switches that a run has on such a model."""
    cfg = OmegaConf.create({"model": {}, "loss": {"_component_": CHUNKED}})
    size = dist.get_world_size() if dist.is_initialized() else 1
    environment = Environment(torch.device("cpu"), torch.float32, Alone(size))
    return build_switches(Asked.of(cfg, "full"), environment, model, objective)


def distillation(teacher: nn.Module, ratio: float = 0.5) -> Distillation:
    """An objective of two models."""
    losses = (
        each(num_output_chunks=2)
        for each in (CEWithChunkedOutputLoss, ForwardKLWithChunkedOutputLoss)
    )
    return Distillation(*losses, teacher.requires_grad_(False), ratio)
