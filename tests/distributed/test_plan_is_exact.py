"""What is predicted is what happens: traces of imagined ranks against real ranks on the simulated device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from tests.helpers.ranks import run_ranks
from torchtune_adaptive import build
from torchtune_adaptive.consensus import Ranks
from torchtune_adaptive.forecast import Beginning, Bilinear, Device, peak
from torchtune_adaptive.memory import SimulatedMemory
from torchtune_adaptive.step import TrainStep
from torchtune_adaptive.trace import Tracer

DEVICE = Device("simulated device", 1 << 40, caching=False)
CORNERS = [(2, 64), (3, 64), (2, 128), (3, 128)]
HELD_OUT = [(5, 256), (9, 32)]
SIZES = [(1, 64), *CORNERS, *HELD_OUT]


def a_config(kind: str, checkpointing: bool, accumulation: int, vocabulary: int) -> DictConfig:
    lora = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True}
    lora |= {"lora_rank": 4, "lora_alpha": 8, "use_dora": kind == "dora"}
    return OmegaConf.create(
        {
            "model": {
                "_component_": f"torchtune.models.llama2.{'' if kind == 'full' else 'lora_'}llama2",
                "vocab_size": vocabulary,
                "num_layers": 3,
                "num_heads": 4,
                "num_kv_heads": 2,
                "embed_dim": 64,
                "intermediate_dim": 160,
                "max_seq_len": 512,
                **({} if kind == "full" else lora),
            },
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "enable_activation_checkpointing": checkpointing,
            "gradient_accumulation_steps": accumulation,
            "clip_grad_norm": 1.0,
            "device": "cpu",
            "dtype": "fp32",
        }
    )


def a_step(cfg: DictConfig, memory: SimulatedMemory) -> TrainStep:
    """As a recipe makes it, with random weights in place of a checkpoint."""
    environment = build.Environment(
        torch.device("cpu"), torch.float32, dist.get_rank(), dist.get_world_size()
    )
    weights = config.instantiate(cfg.model).state_dict()
    if "lora_attn_modules" in cfg.model:
        base = {k: v for k, v in weights.items() if "lora" not in k and "magnitude" not in k}
        model = build.lora_model(cfg, environment, base, None)
    else:
        model = build.full_model(cfg, environment, weights)
    optimizers = build.optimizers(cfg, environment, model.module, None)
    return TrainStep(
        model=model.module,
        optimizers=optimizers.steppers,
        loss_fn=build.loss(cfg, environment, model.module),
        device=environment.device,
        memory=memory,
        ranks=Ranks(timeout=20),
        survive=True,
        clip_grad_norm=cfg.clip_grad_norm,
    )


def measured(configs: list[DictConfig]) -> list[dict[tuple[int, int], int]]:
    found = []
    for cfg in configs:
        memory = SimulatedMemory(DEVICE.usable)
        step = a_step(cfg, memory)

        def take(rows: int, length: int, cfg: DictConfig = cfg, step: TrainStep = step) -> None:
            tokens = torch.randint(0, cfg.model.vocab_size, (rows, length))
            batch = {"tokens": tokens, "labels": tokens.clone()}
            for _ in range(cfg.gradient_accumulation_steps):
                step.forward_backward(batch)
            step.apply()

        for _ in range(2):  # the optimizer makes its state, and collectives are recorded
            take(2, 32)
        peaks = {}
        for size in SIZES:
            memory.watch()
            take(*size)
            peaks[size] = memory.usage().peak_bytes
        found.append(peaks)
    return found


def predicted(configs: list[DictConfig], ranks: int) -> list[dict[tuple[int, int], int]]:
    """By a trace of each size; those that are held out are also worked out of the others."""
    found = []
    for cfg in configs:
        tracer = Tracer(cfg, ranks)
        beginning = Beginning(tracer.set_up, tracer.take_step(2, 32))
        steps = {size: tracer.take_step(*size).renumbered() for size in SIZES}
        between = Bilinear({size: steps[size] for size in CORNERS})
        for size in HELD_OUT:
            assert between.step(*size).events == steps[size].events, (cfg, size)
        found.append({s: peak(beginning, steps[s], *s, DEVICE).live for s in SIZES})
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_predicted_peaks_are_measured_peaks(ranks: int) -> None:
    grid = [
        (kind, checkpointing, accumulation, (512, 2000)[(checkpointing + accumulation) % 2])
        for kind in ("full", "lora")
        for checkpointing in (False, True)
        for accumulation in (1, 2)
    ]
    grid.append(("dora", True, 1, 512))
    configs = [a_config(*case) for case in grid]
    measurements = run_ranks(measured, ranks, configs, timeout=100)[0]
    [predictions] = run_ranks(predicted, 1, configs, ranks, timeout=100, join=False)
    for case, prediction, measurement in zip(grid, predictions, measurements, strict=True):
        assert prediction == measurement, case  # to the byte
