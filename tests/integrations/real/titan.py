"""torchtitan's trainer on a tiny Llama with random weights, plain or ours, on a CPU. No downloads.

torchtitan is made for accelerators and a newer torch. What stands in for these is at the top. Its trainer,
models, ways of sharding and splitting, losses and checkpoints are its own. All trainers of a test share the
process group that ``run_ranks`` makes.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils

torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = torch.cpu
for name, value in {
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 30),
    "memory_stats": {},
    "current_device": 0,
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}.items():
    setattr(torch.cpu, name, lambda *_, value=value: value)
if not hasattr(dist, "set_timeout"):  # which is to come in torch 2.14
    dist.set_timeout = lambda *_, **__: None  # type: ignore[attr-defined]

torch.autograd.set_multithreading_enabled(False)  # as where torchtitan makes the process group

import torchtitan.trainer  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402

from tests.helpers import ranks as helper  # noqa: E402
from torchtune_adaptive.integrations import Adaptive  # noqa: E402
from torchtune_adaptive.integrations.torchtitan import adaptive  # noqa: E402

WORDS = 512
LENGTH = 32
SEARCHING = Adaptive(memory_limit="64MiB")
AS_CONFIGURED = Adaptive(search=False)

helper._context.set_forkserver_preload(["tests.integrations.real.titan"])


class Words(BaseTokenizer):  # type: ignore[misc]
    """A tokenizer that is never asked."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError

    def decode(self, *_: Any, **__: Any) -> str:
        raise AssertionError

    def get_vocab_size(self) -> int:
        return WORDS


class Random(BaseDataLoader):  # type: ignore[misc]
    """Random words, some of which do not count, others on each rank that has rows of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        batches: int = 1 << 30
        infinite: bool = False
        """What a validator sets; it stops by itself."""
        more: bool = False
        """Whether there is an input that has no row for each label."""

    def __init__(
        self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.config, self.rank, self.shape = config, dp_rank, (local_batch_size, seq_len + 1)
        self.number = 0

    def __iter__(self) -> Any:
        while self.number < self.config.batches:
            draw = torch.Generator().manual_seed(1000 * self.rank + self.number)
            self.number += 1
            words = torch.randint(0, WORDS, self.shape, generator=draw)
            labels = words[:, 1:].contiguous()
            labels[:, : 1 + self.number % 5] = -100
            positions = torch.arange(LENGTH).expand(len(words), -1).contiguous()
            inputs = {"input": words[:, :-1].contiguous(), "positions": positions}
            yield inputs | ({"pixels": torch.zeros(7)} if self.config.more else {}), labels

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def config(folder: str, chunks: int = 0, backend: str = "partial_dtensor", **settings: Any) -> Any:
    """The config of a run; settings such as ``training__steps=3`` are set in it."""
    made = config_registry.llama3_debugmodel()
    model = made.model_spec.model
    model.layers = model.layers[:2]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = WORDS
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if chunks:
        made.loss.num_chunks = chunks
        made.loss.loss_fn.global_vocab_size = WORDS
    else:
        made.loss = CrossEntropyLoss.Config(global_vocab_size=WORDS)
    made.tokenizer, made.dataloader = Words.Config(), Random.Config()
    made.validator = Validator.Config(enable=False, dataloader=Random.Config(batches=2), steps=2)
    replicas = int(os.environ["WORLD_SIZE"]) // settings.get(
        "parallelism__tensor_parallel_degree", 1
    )
    rows = {"local_batch_size": 4, "global_batch_size": 8 * replicas, "seq_len": LENGTH}
    defaults = {
        **{f"training__{name}": value for name, value in rows.items()},
        "training__steps": 4,
        "training__disable_cuda_graphs": True,
        "training__mixed_precision_param": "float32",
        "parallelism__spmd_backend": backend,
        "activation_checkpoint": None,
        "dump_folder": folder,
        "debug__seed": 0,
    }
    for name, value in (defaults | settings).items():
        *path, last = name.split("__")
        owner = made
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return made


@dataclass(frozen=True)
class Loss:
    """Where memory runs out: on a rank, in a step, so many times, in a layer or in the ``head``."""

    step: int = 2
    rank: int = 0
    times: int = 2
    where: str = "layer"


@dataclass
class Result:
    logs: list[dict[str, float]]
    weights: torch.Tensor
    sizes: tuple[int, int] | None = None
    """The size at the beginning, and at the end."""
    more: dict[str, Any] = field(default_factory=dict)

    def far(self, other: Result) -> float:
        """The largest relative difference of what is logged."""
        assert [[*entry] for entry in self.logs] == [[*entry] for entry in other.logs]
        pairs = zip(self.logs, other.logs, strict=True)
        return max(
            abs(one[name] - two[name]) / max(abs(two[name]), 1e-12)
            for one, two in pairs
            for name in one
        )


def train(made: Any, options: Adaptive | None = None, lost: Loss | None = None) -> Result:
    """The result of a training; plain without options."""
    logging.getLogger().setLevel(logging.ERROR)
    # Rank 0 sleeps at the end, for the others.
    torchtitan.trainer.time = SimpleNamespace(sleep=lambda _: None, perf_counter=time.perf_counter)
    trainer = (made if options is None else adaptive(made, options)).build()
    try:
        return _trained(trainer, lost)
    finally:
        trainer.close()


def _trained(trainer: Any, lost: Loss | None) -> Result:
    [model], logs = trainer.model_parts, []
    adaptive_metrics: list[dict[str, float]] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    processor = trainer.metrics_processor
    own = processor.log

    def logged(step: int, loss: float, most: float, norm: float, extra_metrics: Any) -> None:
        tokens = {"since": processor.ntokens_since_last_log}
        losses = {"step": step, "loss": loss, "most": most, "norm": norm}
        ours = {name: extra_metrics[name] for name in extra_metrics if name[:9] == "adaptive/"}
        adaptive_metrics.append(ours)
        logs.append(losses | tokens | {k: v for k, v in extra_metrics.items() if k not in ours})
        own(step, loss, most, norm, extra_metrics=extra_metrics)

    processor.log = logged
    validated = processor.log_validation
    processor.log_validation = lambda loss, step, *rest, **named: (
        logs.append({"validation": loss}),
        validated(loss, step, *rest, **named),
    )
    left = lost.times if lost and lost.rank == dist.get_rank() else 0

    def lose(*_: Any) -> None:
        nonlocal left
        if left and trainer.step == lost.step and torch.is_grad_enabled():  # type: ignore[union-attr]
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    where = model.lm_head if lost and lost.where == "head" else model.layers["1"]
    where.register_forward_pre_hook(lose)
    trainer.train()
    assert not left
    step = getattr(trainer, "_adaptive_step", None)
    sizes = (step._size, step._step._runner.size) if step else None
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    weights = torch.cat([p.detach().flatten() for p in whole])
    return Result(logs, weights, sizes, {"adaptive": adaptive_metrics})
