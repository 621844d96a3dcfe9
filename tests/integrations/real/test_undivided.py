"""Losses and layers over a whole batch train as in the plain trainer, in batches that are not divided."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.integrations.real.models import EXPERTS, experts_that_see, of_experts
from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    Loss,
    distance,
    fsdp2_on_cpu,
    lose_memory,
    make,
    on_ranks,
    trained,
)
from tests.integrations.real.ways import WAYS
from torchtune_adaptive.common import TrainingOutOfMemory
from torchtune_adaptive.integrations import Adaptive

CLOSE = 1e-6
SGD = {"optim": "sgd", "learning_rate": 0.1, "warmup_steps": 0}


def rows(count: int = 64, **made: Callable[[torch.Generator], Any]) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    return [{name: value(draw) for name, value in made.items()} for _ in range(count)]


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Towers(nn.Module):
    """Two towers whose rows are told apart from each other: a single row has the loss 0."""

    def __init__(self, labels: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 16)])
        self.labels = labels

    def forward(self, x: Any = None, y: Any = None, labels: Any = None) -> dict[str, Any]:
        one, other = (
            nn.functional.normalize(f(v)) for f, v in zip(self.layers, (x, y), strict=True)
        )
        return {"loss": cross_entropy(one @ other.T * 10, torch.arange(len(one)))}


class Normalizing(nn.Module):
    """A layer of BatchNorm between others."""

    supports_gradient_checkpointing = True
    is_gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)])
        self.seen: list[float] = []

    def gradient_checkpointing_enable(self, *_: Any) -> None:
        self.is_gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.is_gradient_checkpointing = False

    def forward(self, x: Any = None, labels: Any = None) -> dict[str, Any]:
        first = lambda x: self.layers[1](self.layers[0](x))  # noqa: E731
        if self.is_gradient_checkpointing and self.training:
            hidden = torch.utils.checkpoint.checkpoint(first, x, use_reentrant=False)
        else:
            hidden = first(x)
        logits = self.layers[2](hidden.relu())
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tokens = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    text = small | tokens | {"max_position_embeddings": 16}
    vision = small | {"image_size": 8, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def pairs() -> list[dict[str, Any]]:
    return rows(x=lambda g: torch.randn(8, generator=g), y=lambda g: torch.randn(8, generator=g))


def classes() -> list[dict[str, Any]]:
    return rows(
        x=lambda g: torch.randn(8, generator=g), labels=lambda g: torch.randint(4, (), generator=g)
    )


def captions() -> list[dict[str, Any]]:
    return rows(
        input_ids=lambda g: torch.randint(3, 50, (8,), generator=g),
        pixel_values=lambda g: torch.randn(3, 8, 8, generator=g),
    )


OWN: dict[str, Callable[[], dict[str, Any]]] = {
    "two towers": lambda: {"model": Towers(False), "data": pairs(), "collate": stacked},
    "two towers with labels": lambda: {
        "model": Towers(True),
        "data": [row | {"labels": torch.tensor(0)} for row in pairs()],
        "collate": stacked,
    },
    "CLIP": lambda: {
        "model": clip(),
        "data": captions(),
        "collate": lambda rows: stacked(rows) | {"return_loss": True},
    },
    "BatchNorm": lambda: {"model": Normalizing(), "data": classes(), "collate": stacked},
}
KINDS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    **{name: ("trainer", of) for name, of in OWN.items()},
    **{
        f"{kind} of {name}": (kind, partial(of_experts, kind, name))
        for kind, name in [
            *(("sft", name) for name in EXPERTS),
            ("trainer", "Qwen3MoeForCausalLM"),
            ("dpo", "OlmoeForCausalLM"),
            ("kto", "MixtralForCausalLM"),
            ("grpo", "Qwen3MoeForCausalLM"),
            ("rloo", "Qwen3MoeForCausalLM"),
        ]
    },
    "sft of a model that sees": ("sft", lambda: {"model": experts_that_see()}),
    "kto": ("kto", lambda: {"loss_type": "kto"}),
    "dpo, aot": ("dpo", lambda: {"loss_type": ["sigmoid", "aot"]}),
    "dpo, sft": ("dpo", lambda: {"loss_type": ["sigmoid", "sft"]}),
    "grpo, bnpo": ("grpo", lambda: {"loss_type": "bnpo"}),
    "grpo, entropy": ("grpo", lambda: {"entropy_coef": 0.1}),
    "grpo, adaptive entropy": (
        "grpo",
        lambda: {"use_adaptive_entropy": True, "entropy_target": 4.0, "entropy_coef": 0.1},
    ),
    "grpo, quantile": ("grpo", lambda: {"top_entropy_quantile": 0.5}),
}


def settings(name: str, way: str = "") -> tuple[str, dict[str, Any]]:
    kind, of = KINDS[name]
    made = SGD | of()
    if "collate" in made:
        collate = made.pop("collate")
        made["data_collator"] = lambda: collate
        made["remove_unused_columns"] = False
    made |= WAYS.get(way, {})
    if way == "fsdp2":
        fsdp2_on_cpu()
        [layer, *_] = made["model"]._no_split_modules
        made["fsdp_config"] = WAYS["fsdp2"]["fsdp_config"] | {
            "transformer_layer_cls_to_wrap": [layer]
        }
    return kind, made


def compared(name: str) -> dict[str, Any]:
    def run(options: Any, lost: Any = ()) -> Any:
        kind, made = settings(name)
        return trained(kind, options, lost, **made)

    plain, equal, searched = run(None), run(AS_CONFIGURED), run(SEARCHING)
    found = {
        "logs": [one.without_times() for one in (plain, equal)],
        "same": torch.equal(plain.weights, equal.weights),
        "searched": torch.equal(plain.weights, searched.weights),
        "sizes": searched.sizes,
    }
    if name.startswith(("two", "kto", "grpo, ")):
        return found
    lost = run(AS_CONFIGURED, Loss(step=1, times=1))
    return found | {"lost": distance(lost, plain), "after": lost.sizes}


@pytest.mark.parametrize("name", KINDS)
def test_equals_the_plain_trainer(name: str) -> None:
    [found] = on_ranks(compared, 1, name)
    plain, equal = found.pop("logs")
    assert [*map(dict.keys, plain)] == [*map(dict.keys, equal)]
    for entry, ours in zip(plain, equal, strict=True):
        assert ours == pytest.approx(entry, rel=CLOSE, abs=CLOSE)
    assert found["same"] and found["searched"] and found["sizes"] == (4, 4), found
    assert found.get("lost", 0) <= CLOSE and found.get("after", (4, 4)) == (4, 4), found


def on_two(name: str, way: str) -> dict[str, Any]:
    def run(options: Any, lost: Any = ()) -> Any:
        kind, made = settings(name, way)
        return trained(kind, options, lost, **made)

    plain, equal = run(None), run(AS_CONFIGURED)
    lost = [run(AS_CONFIGURED, Loss(step=1, rank=on, times=1)) for on in (0, 1)]
    return {
        "equal": distance(equal, plain),
        "lost": [distance(each, plain) for each in lost],
        "sizes": [each.sizes for each in lost],
    }


ON_TWO = {
    "BatchNorm": "ddp",
    "kto": "ddp",
    "sft of Qwen3MoeForCausalLM": "fsdp2",
    "grpo, bnpo": "ddp",
}


@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_ranks(name: str) -> None:
    for seen in on_ranks(on_two, 2, name, ON_TWO[name]):
        assert seen["equal"] <= CLOSE and max(seen["lost"]) <= CLOSE, seen
        assert seen["sizes"] == [(4, 4)] * 2, seen


def without_memory() -> str:
    """What ends a training in which memory runs out also with all layers checkpointed."""
    with tempfile.TemporaryDirectory() as folder:
        options = Adaptive(search=False, wait_for_memory=0)
        kind, made = settings("kto")
        trainer = make(kind, options, folder, **made, save_strategy="steps", save_steps=1)
        lose_memory(trainer, Loss(step=2, times=100))
        with pytest.raises(TrainingOutOfMemory) as error:
            trainer.train()
    return str(error.value).replace(folder, "FOLDER")


def test_what_does_not_fit_undivided_ends_with_the_last_checkpoint_and_what_to_set() -> None:
    [said] = on_ranks(without_memory, 1)
    assert "\n" not in said and "FOLDER/checkpoint-2" in said
    assert "per_device_train_batch_size" in said and "kto compares each row" in said


class OfOneRow(nn.Module):
    """Takes one row, as models of packed rows do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])

    def forward(self, x: Any = None, labels: Any = None) -> dict[str, Any]:
        [row] = x
        return {"loss": cross_entropy(self.layers[1](self.layers[0](row)), labels[0])}


def in_single_rows(accumulation: int) -> dict[str, Any]:
    def run(options: Any) -> Any:
        made = SGD | {"model": OfOneRow(), "data": classes(), "remove_unused_columns": False}
        made |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation}
        return trained("trainer", options, **made, data_collator=lambda: stacked)

    plain, ours = run(None), run(SEARCHING)
    return {"far": distance(ours, plain), "sizes": ours.sizes}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_that_takes_one_row_gets_no_more(accumulation: int) -> None:
    assert on_ranks(in_single_rows, 1, accumulation) == [{"far": 0.0, "sizes": (1, 1)}]


def gathers(rows: int, options: Any = None) -> int:
    """What a training gathers for metrics after its first step, in batches of so many of 8 rows."""
    from torch import distributed
    from transformers import TrainerCallback

    count, own = 0, distributed.all_gather

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return own(*args, **named)

    class Counting(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *_: Any, **named: Any) -> None:
            nonlocal count
            count *= state.global_step > 1

    distributed.all_gather = counted  # by which accelerate gathers with gloo
    try:
        batches = {"gradient_accumulation_steps": 8 // rows}
        batches["per_device_train_batch_size"] = rows
        trained("sft", options, callbacks=[Counting()], **batches)
    finally:
        distributed.all_gather = own
    return count


def of_ways() -> list[int]:
    half = Adaptive(search=False, ceiling=2)
    return [gathers(2), gathers(4, half), gathers(4), gathers(4, AS_CONFIGURED)]


def test_other_micro_batches_gather_no_more_than_batches_of_that_size() -> None:
    for small, halved, plain, equal in on_ranks(of_ways, 2):
        assert halved == small and equal == plain > 0, (small, halved, plain, equal)
