"""What the integration relies on in torchtitan: each fact, on the installed version."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.models.common.moe import MoE
from torchtitan.trainer import Trainer

from tests.helpers.ranks import run_ranks
from tests.integrations.real.titan import config
from torchtune_adaptive.core.ranks import fsdp

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]

FACTS = {
    "one batch": "train_step takes gradient_accumulation_steps batches, and forward_backward_step each once",
    "one loss": "forward_backward_step calls loss_fn once, and goes backward from what it returns",
    "linear loss": "a loss is divided by global_valid_tokens, whatever number that is, and by nothing else",
    "sum over ranks": "FSDP sums gradients over ranks, and divides them by 1",
    "counted tokens": "forward_backward_step changes no attribute of a trainer but ntokens_seen",
    "own log": "train_step logs by metrics_processor.log, which takes extra_metrics",
    "owner of a config": "build() of a config makes the class in which its class stands, as _owner says",
    "one optimizer": "optimizers.optimizers is a list of torch's own, one for all parameters by default",
    "parts of the data": "dataloader.build makes the loader of a dp_rank of dp_world_size, saved by both",
    "loading": "a checkpoint is loaded by checkpointer.dcp_load, before train() reads dataloader",
    "counted experts": "a mixture of experts is a MoE, which counts tokens in forward",
}
CHECKS: dict[str, Callable[[Any], Any]] = {}
"""Functions that raise where a fact does not hold; each gets a plain trainer."""


def check(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def added(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        CHECKS[name] = function
        return function

    return added


def a_step(trainer: Any) -> None:
    trainer.step += 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))


@check("one batch")
def one_batch(trainer: Any) -> None:
    own, seen = trainer.forward_backward_step, []

    def watched(*, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        seen.append((sorted(input_dict), len(labels), int(global_valid_tokens)))
        return own(input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens)

    trainer.forward_backward_step = watched
    assert trainer.gradient_accumulation_steps == 2
    a_step(trainer)
    assert seen == [(["input", "positions"], 4, seen[0][2])] * 2
    trainer.gradient_accumulation_steps = 1
    a_step(trainer)
    assert len(seen) == 3 and trainer.dataloader.number == 3


def one_micro_batch(trainer: Any, terms: float) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
    """The arguments of the loss in a pass, its value, and a gradient."""
    inputs, labels = next(iter(trainer.dataloader))
    trainer.dataloader.number = 0  # the same each time
    own, calls = trainer.loss_fn, []

    def watched(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return own(*arguments, **named)

    trainer.optimizers.zero_grad()
    trainer.loss_fn = watched
    value = trainer.forward_backward_step(
        input_dict=inputs, labels=labels, global_valid_tokens=torch.tensor(terms)
    )
    trainer.loss_fn = own
    [parameter, *_] = trainer.model_parts[0].parameters()
    return calls, value.detach(), parameter.grad.full_tensor()


@check("one loss")
def one_loss(trainer: Any) -> None:
    calls, value, gradient = one_micro_batch(trainer, 100.0)
    assert len(calls) == 1 and value.ndim == 0 and gradient.abs().sum() > 0


@check("linear loss")
def linear_loss(trainer: Any) -> None:
    (_, one, gradient), (_, two, half) = (one_micro_batch(trainer, terms) for terms in (100.0, 200))
    assert torch.allclose(one, 2 * two) and torch.allclose(gradient, 2 * half)


@check("sum over ranks")
def sum_over_ranks(trainer: Any) -> None:
    assert fsdp.divisor(trainer.model_parts[0]) == 1


@check("counted tokens")
def counted_tokens(trainer: Any) -> None:
    before = {name: repr(value) for name, value in vars(trainer).items()}
    one_micro_batch(trainer, 100.0)
    after = {name: repr(value) for name, value in vars(trainer).items()}
    assert {name for name in after if after[name] != before[name]} <= {"ntokens_seen", "dataloader"}
    assert trainer.ntokens_seen > 0


@check("own log")
def own_log(trainer: Any) -> None:
    processor = trainer.metrics_processor
    own, seen = processor.log, []
    processor.log = lambda *args, extra_metrics, **named: (
        seen.append(extra_metrics),
        own(*args, extra_metrics={**extra_metrics, "adaptive/micro_batch": 4}, **named),
    )
    a_step(trainer)
    assert len(seen) == 1 and "n_tokens_seen" in seen[0]


@check("owner of a config")
def owner_of_a_config(trainer: Any) -> None:
    assert type(trainer) is Trainer and type(trainer.config)._owner is Trainer


@check("one optimizer")
def one_optimizer(trainer: Any) -> None:
    [optimizer] = trainer.optimizers.optimizers
    assert type(optimizer) is torch.optim.AdamW


@check("parts of the data")
def parts_of_the_data(trainer: Any) -> None:
    class Loader(ParallelAwareDataloader):  # type: ignore[misc]
        pass

    state = Loader([1, 2], dp_rank=1, dp_world_size=3).state_dict()
    assert {*state} == {"dp_rank_1", "world_size"} and state["world_size"] == 3
    made = inspect.getsource(Trainer.__init__)
    named = ("dp_world_size", "dp_rank", "tokenizer", "seq_len", "local_batch_size")
    assert all(f"{name}=" in made.split("config.dataloader.build(")[1] for name in named)


@check("loading")
def loading(trainer: Any) -> None:
    assert "self.dcp_load(" in inspect.getsource(CheckpointManager._load)
    loads, reads = "self.checkpointer.load(", "self.batch_generator(self.dataloader)"
    trained = inspect.getsource(Trainer.train)
    assert 0 < trained.index(loads) < trained.index(reads)


@check("counted experts")
def counted_experts(trainer: Any) -> None:
    assert "tokens_per_expert" in inspect.getsource(MoE)


@pytest.mark.parametrize("name", FACTS)
def test_fact(name: str) -> None:
    run_ranks(_with_a_trainer, 1, name)


def _with_a_trainer(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        CHECKS[name](config(folder).build())
