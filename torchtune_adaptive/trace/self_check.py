"""Whether traces are right with the installed version of torch.

Tracing relies on private parts of torch. So a small model is trained for a few steps on the simulated device,
which counts real tensors, and also traced: both must take the same memory, to the byte. If they do not, there
is no prediction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtune import config, training

from torchtune_adaptive.cache import Cache, cache_folder, libraries, package_fingerprint
from torchtune_adaptive.device.simulated import SimulatedMemory
from torchtune_adaptive.errors import NoPrediction
from torchtune_adaptive.memory_model.peak import DeviceLimits, StartUp, peak
from torchtune_adaptive.ranks.agreement import Ranks
from torchtune_adaptive.setup.environment import Environment
from torchtune_adaptive.setup.kinds import recipe_kind
from torchtune_adaptive.setup.optimizer import build_loss, build_optimizers
from torchtune_adaptive.step.objective import NextTokenPrediction
from torchtune_adaptive.step.train_step import StepOptions, TrainStep
from torchtune_adaptive.trace import fake_device
from torchtune_adaptive.trace.recorder import Recorder, Watch
from torchtune_adaptive.trace.tracer import Tracer

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
    """Check that tracing works here. Call it in a process that does nothing else: see ``fake_device``.

    Args:
        cache: the run's setting: where it is kept that the check has passed.

    Raises:
        NoPrediction: it does not work.
    """
    passed: Cache[bool] = Cache(
        cache_folder(cache, "self_checks"), "self-check", lambda value: value is True
    )
    facts = {"libraries": libraries(), "code": package_fingerprint()}
    if passed.get(facts):
        return
    fake_device.device()  # first: autograd counts the devices at its first backward pass
    cfg = OmegaConf.create(SMALL_RUN)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        measured = measured_peaks(cfg, _SIZES)
    finally:
        dist.destroy_process_group()
    traced = traced_peaks(Tracer(cfg, ranks=1), _SIZES)
    if traced != measured:
        raise _no_prediction(
            f"steps of {_SIZES} rows and tokens took {list(measured.values())} bytes instead of "
            f"{list(traced.values())}"
        )
    if (made := _gradients_made()) != _GRADIENTS_MADE:
        raise _no_prediction(
            f"the sum of three gradients took {made} allocations instead of {_GRADIENTS_MADE}"
        )
    passed.put(facts, True)


def _no_prediction(reason: str) -> NoPrediction:
    return NoPrediction(
        f"With torch {torch.__version__} the memory of a step cannot be predicted: on the self-check model, "
        f"{reason}. Use a torch version that this package was tested with (see its README), or search on "
        "the device (adaptive_batching.search=extrapolate)."
    )


def measured_peaks(cfg: DictConfig, sizes: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Peak bytes by (rows, length), of training with random weights on the simulated device.

    The process group must exist.
    """
    memory = SimulatedMemory(1 << 40)
    step = _real_step(cfg, memory)

    def take(rows: int, length: int) -> None:
        tokens = torch.randint(0, cfg.model.vocab_size, (rows, length))
        batch = {"tokens": tokens, "labels": tokens.clone()}
        for _ in range(cfg.gradient_accumulation_steps):
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


def _real_step(cfg: DictConfig, memory: SimulatedMemory) -> TrainStep:
    """The step of a recipe, with random weights instead of a checkpoint."""
    environment = Environment(
        torch.device("cpu"), torch.float32, dist.get_rank(), dist.get_world_size()
    )
    weights: dict[str, Any] = config.instantiate(cfg.model).state_dict()
    base = {k: v for k, v in weights.items() if "lora" not in k and "magnitude" not in k}
    model = recipe_kind(cfg).build(cfg, environment, {training.MODEL_KEY: base})
    optimizers = build_optimizers(cfg, environment, model.module, None)
    return TrainStep(
        model=model.module,
        objective=NextTokenPrediction(build_loss(cfg, environment, model.module)),
        optimizers=optimizers.steppers,
        device=environment.device,
        memory=memory,
        ranks=Ranks(timeout=20),
        options=StepOptions(
            clip_grad_norm=cfg.clip_grad_norm, optimizer_in_backward=optimizers.in_backward
        ),
    )


def traced_peaks(tracer: Tracer, sizes: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """The same from a trace of each size."""
    start_up = StartUp(tracer.set_up, tracer.take_step(*_FIRST))
    device = DeviceLimits("simulated device", 1 << 40, caching=False)
    return {size: peak(start_up, tracer.take_step(*size), *size, device).live for size in sizes}


_GRADIENTS_MADE = 4
"""Each of the three, and the one that they flow into; their sum is in place."""


def _gradients_made() -> int:
    """The allocations of a small backward pass on the fake device that sums three gradients."""
    device = fake_device.device()
    recorder = Recorder(device)
    with FakeTensorMode(), Watch(recorder):
        leaf = torch.empty(1024, device=device, requires_grad=True)
        inner = leaf * 1
        end = (inner * 2 + inner * 3 + inner * 4).sum()
        recorder.take_events()
        end.backward()
    return sum(event.nbytes == leaf.nbytes for event in recorder.take_events().events)
