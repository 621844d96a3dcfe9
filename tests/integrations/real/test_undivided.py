"""Losses and layers over a whole batch train as in the plain trainer, in batches that are not divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    LLAMA,
    SEARCHING,
    Loss,
    distance,
    on_ranks,
    trained,
)

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
EXPERTS = {
    "Qwen3MoeForCausalLM": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "MixtralForCausalLM": {"num_local_experts": 4},
    "OlmoeForCausalLM": {"num_experts": 4},
    "GptOssForCausalLM": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8},
}


def experts(name: str, **config: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    small = LLAMA | {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "router_aux_loss_coef": 0.1,
    }
    made = kind.config_class(**small | EXPERTS[name] | config)
    made._attn_implementation = "eager"
    return kind(made)


def of_experts(kind: str, name: str) -> dict[str, Any]:
    more: dict[str, Any] = {"model": experts(name)}
    if kind == "trainer":
        more["model"] = experts(name, output_router_logits=True)
    if kind in ("dpo", "kto"):
        more["ref_model"] = experts(name)
    if kind == "reward":
        from transformers import Qwen3MoeForSequenceClassification

        torch.manual_seed(0)
        more["model"] = Qwen3MoeForSequenceClassification(
            more["model"].config.__class__(**more["model"].config.to_dict() | {"num_labels": 1})
        )
    return more


KINDS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    **{name: ("trainer", of) for name, of in OWN.items()},
    **{
        f"{kind} of {name}": (kind, lambda kind=kind, name=name: of_experts(kind, name))
        for kind, name in [
            *(("sft", name) for name in EXPERTS),
            ("trainer", "Qwen3MoeForCausalLM"),
            ("dpo", "OlmoeForCausalLM"),
            ("kto", "MixtralForCausalLM"),
            ("grpo", "Qwen3MoeForCausalLM"),
            ("rloo", "Qwen3MoeForCausalLM"),
        ]
    },
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
    if way == "fsdp2":
        made["fsdp"] = True
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
