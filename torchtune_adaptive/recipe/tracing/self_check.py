"""Whether traces are right with the installed version of torch.

Tracing relies on private parts of torch. So a small model is trained for a few steps on the simulated device,
which counts real tensors, and also traced: both must take the same memory, to the byte. If they do not, there
is no prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training

from torchtune_adaptive.core import Ranks, SimulatedMemory, StepOptions, TrainStep
from torchtune_adaptive.planner import (
    DeviceLimits,
    StartUp,
    check_sums,
    fake_device,
    no_prediction,
    peak,
)
from torchtune_adaptive.recipe.kinds.by_name import recipe_kind
from torchtune_adaptive.recipe.kinds.recipe_kind import RecipeKind
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.model_switches import build_switches
from torchtune_adaptive.recipe.setup.optimizer import build_optimizers
from torchtune_adaptive.recipe.tracing.tracer import Tracer
from torchtune_adaptive.recipe.tracing.traces import PassedCheck

_FIRST = (2, 32)
_SIZES = [(2, 64), (5, 128)]

SMALL_RUN = {
    "model": {
        "_component_": "torchtune.models.llama2.llama2",
        "vocab_size": 500,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 64,
        "intermediate_dim": 160,
        "max_seq_len": 512,
    },
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "enable_activation_checkpointing": True,
    "gradient_accumulation_steps": 2,
    "clip_grad_norm": 1.0,
    "device": "cpu",
    "dtype": "fp32",
}


def check_method(cache: bool | str) -> None:
    """Check that tracing works here, unless the cache of that setting remembers it. Call it in a process that
    does nothing else: see ``fake_device``.

    Raises:
        NoPrediction: it does not work.
    """
    passed = PassedCheck(cache)
    if passed.is_known():
        return
    fake_device.device()  # first: autograd counts the devices at its first backward pass
    asked = Asked.of(OmegaConf.create(SMALL_RUN), "full")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        measured = measured_peaks(asked, _SIZES)
    finally:
        dist.destroy_process_group()
    traced = traced_peaks(Tracer(asked, ranks=1), _SIZES)
    if traced != measured:
        raise no_prediction(
            f"steps of {_SIZES} rows and tokens took {list(measured.values())} bytes instead of "
            f"{list(traced.values())}"
        )
    check_sums()
    passed.remember()


def measured_peaks(
    asked: Asked,
    sizes: Iterable[tuple[int, int]],
    make_batch: Callable[[int, int], dict[str, Any]] | None = None,
) -> dict[tuple[int, int], int]:
    """Peak bytes by (rows, length), of training with random weights on the simulated device. The process
    group must exist. Batches are of text, unless ``make_batch`` makes others."""
    memory = SimulatedMemory(1 << 40)
    kind = _real_kind(asked)
    step = _real_step(kind, memory)

    def text(rows: int, length: int) -> dict[str, Any]:
        batch = kind.rows().imagined(rows, length, simulated=True)
        tokens = torch.randint(0, asked.cfg.model.vocab_size, batch["tokens"].shape)
        return {**batch, "tokens": tokens, "labels": tokens.clone()}

    def take(rows: int, length: int) -> None:
        batch = (make_batch or text)(rows, length)
        for _ in range(kind.asked.accumulation):
            step.forward_backward(batch)
        step.apply()

    for _ in range(2):  # the optimizer creates its state, and collectives are recorded
        take(*_FIRST)
    peaks = {}
    for size in sizes:
        memory.watch()
        take(*size)
        peaks[size] = memory.usage().peak_bytes
    return peaks


def _real_kind(asked: Asked) -> RecipeKind:
    device = torch.device("cpu")
    dtype = training.get_dtype(asked["dtype"], device)
    environment = Environment(device, dtype, Ranks(timeout=20))
    return recipe_kind(asked, environment)


def _random_weights(cfg: DictConfig, block: str) -> dict[str, Any]:
    """Weights as a checkpoint has them: without adapters."""
    weights: dict[str, Any] = config.instantiate(cfg[block]).state_dict()
    return {k: v for k, v in weights.items() if "lora" not in k and "magnitude" not in k}


def _real_step(kind: RecipeKind, memory: SimulatedMemory) -> TrainStep:
    """The step of a recipe, with random weights instead of a checkpoint."""
    asked, cfg, environment = kind.asked, kind.asked.cfg, kind.environment
    model = kind.model({training.MODEL_KEY: _random_weights(cfg, "model")})
    frozen = kind.frozen([_random_weights(cfg, each.model) for each in asked.kind.frozen])
    optimizers = build_optimizers(asked, environment, model.module, None)
    objective = kind.objective(model.module, frozen)
    return TrainStep(
        model=model.module,
        objective=objective,
        optimizers=optimizers.steppers,
        device=environment.device,
        memory=memory,
        ranks=environment.ranks,
        options=StepOptions(
            switches=build_switches(asked, environment, model.module, objective),
            clip_grad_norm=asked["clip_grad_norm"],
            optimizer_in_backward=optimizers.in_backward,
        ),
    )


def traced_peaks(tracer: Tracer, sizes: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """The same peaks from a trace of each size."""
    start_up = StartUp(tracer.set_up, tracer.take_step(*_FIRST))
    device = DeviceLimits("simulated device", 1 << 40, caching=False)
    return {size: peak(start_up, tracer.take_step(*size), *size, device).live for size in sizes}
