"""Predictions beside peaks that torchtune has published.

    python benchmarks/plan_anchors.py

What was published was measured by others, with torchtune and torch of their time. One difference is undone
where it says so: RMSNorm's formula was written out then, which keeps one tensor less. Rows that were compiled
are here as well: predictions are of eager steps, which take more, so there they are upper bounds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.modules import RMSNorm

from torchtune_adaptive.plan.predict import Prediction, predict
from torchtune_adaptive.plan.request import plan_request
from torchtune_adaptive.plan.workers import processes
from torchtune_adaptive.registry import find_config

GIB, GB = 1 << 30, 10**9
ROOT_README = "README of November 2024 (commit 1814feb17)"
LLAMA2_README = "README of May 2024 (commit 0217d44c2)"
LLAMA31_README = "README of September 2024 (commit 30b8519e8)"

WHOLE_LOSS = {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}
CHUNKED = {"loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}}
CHECKPOINTED = {"enable_activation_checkpointing": True}
OFFLOADED = {"enable_activation_offloading": True}
ADAMW = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5}}
NO_STATE = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 1e-5}}
IN_BACKWARD = {"optimizer_in_bwd": True, "clip_grad_norm": None}
RANK_8_QV = {"model": {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": False}}

THREE_B = "llama3_2/3B_full_single_device"
BARE = {"enable_activation_checkpointing": False, "optimizer_in_bwd": False, **ADAMW}


@dataclass(frozen=True)
class Anchor:
    name: str
    published: float
    unit: int
    source: str
    note: str
    config: str
    changes: tuple[dict[str, Any], ...]
    rows: int
    length: int
    ranks: int = 1
    packed: bool = True
    norm_as_then: bool = False


ANCHORS = [
    Anchor(
        "3B full",
        60.0,
        GIB,
        ROOT_README,
        "eager, RMSNorm as it was then",
        THREE_B,
        (BARE, WHOLE_LOSS),
        2,
        4096,
        norm_as_then=True,
    ),
    Anchor("3B full", 60.0, GIB, ROOT_README, "eager", THREE_B, (BARE, WHOLE_LOSS), 2, 4096),
    Anchor("same", 51.0, GIB, ROOT_README, "compiled", THREE_B, (BARE, WHOLE_LOSS), 2, 4096),
    Anchor("+ chunked loss", 42.9, GIB, ROOT_README, "compiled", THREE_B, (BARE, CHUNKED), 2, 4096),
    Anchor(
        "+ checkpointing",
        24.9,
        GIB,
        ROOT_README,
        "compiled",
        THREE_B,
        (BARE, CHUNKED, CHECKPOINTED),
        2,
        4096,
    ),
    Anchor(
        "+ optimizer in backward",
        23.1,
        GIB,
        ROOT_README,
        "compiled",
        THREE_B,
        (BARE, CHUNKED, CHECKPOINTED, IN_BACKWARD),
        2,
        4096,
    ),
    Anchor(
        "+ offloading",
        21.8,
        GIB,
        ROOT_README,
        "compiled",
        THREE_B,
        (BARE, CHUNKED, CHECKPOINTED, IN_BACKWARD, OFFLOADED),
        2,
        4096,
    ),
    Anchor(
        "3B LoRA",
        8.5,
        GIB,
        ROOT_README,
        "compiled",
        "llama3_2/3B_lora_single_device",
        (CHUNKED, CHECKPOINTED, OFFLOADED),
        2,
        4096,
    ),
    Anchor(
        "3B QLoRA",
        4.6,
        GIB,
        ROOT_README,
        "compiled",
        "llama3_2/3B_qlora_single_device",
        (CHUNKED, CHECKPOINTED, OFFLOADED),
        2,
        4096,
    ),
    Anchor(
        "8B LoRA",
        16.2,
        GIB,
        LLAMA31_README,
        "compiled",
        "llama3_1/8B_lora_single_device",
        (CHECKPOINTED, RANK_8_QV),
        2,
        2048,
    ),
    Anchor(
        "8B QLoRA",
        7.4,
        GIB,
        LLAMA31_README,
        "compiled",
        "llama3_1/8B_qlora_single_device",
        (CHECKPOINTED,),
        2,
        2048,
    ),
    Anchor(
        "70B LoRA, 8 ranks",
        27.6,
        GIB,
        LLAMA31_README,
        "compiled",
        "llama3_1/70B_lora",
        (CHECKPOINTED,),
        2,
        2048,
        ranks=8,
    ),
    Anchor(
        "70B full, CPU offload, 8 ranks",
        13.9,
        GIB,
        LLAMA31_README,
        "compiled",
        "llama3_1/70B_full",
        (CHECKPOINTED, {"fsdp_cpu_offload": True}),
        2,
        2048,
        ranks=8,
    ),
    Anchor(
        "Llama-2 7B LoRA",
        21.3,
        GB,
        LLAMA2_README,
        "eager",
        "llama2/7B_lora_single_device",
        (CHECKPOINTED, RANK_8_QV, WHOLE_LOSS),
        4,
        2048,
        packed=False,
    ),
    Anchor(
        "Llama-2 7B full, in backward",
        20.2,
        GB,
        "pull request 961",
        "eager; paged optimizer state, which is not counted",
        "llama2/7B_full_low_memory",
        (CHECKPOINTED, NO_STATE, IN_BACKWARD, WHOLE_LOSS),
        4,
        2048,
        packed=False,
    ),
]


def config_of(anchor: Anchor) -> DictConfig:
    asked: dict[str, Any] = {
        "batch_size": anchor.rows,
        "gradient_accumulation_steps": 1,
        "compile": False,
        "tokenizer": {"max_seq_len": anchor.length},
        "dataset": {"packed": anchor.packed},
    }
    loaded = OmegaConf.load(find_config(anchor.config))
    for changes in anchor.changes:
        for block in changes.keys() & {"loss", "optimizer"}:
            del loaded[block]
        loaded = OmegaConf.merge(loaded, changes)
    merged = OmegaConf.merge(loaded, asked)
    assert isinstance(merged, DictConfig)
    return merged


def predict_anchor(anchor: Anchor) -> Prediction:
    if anchor.norm_as_then:

        def forward(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
            return scaled.type_as(x) * norm.scale

        RMSNorm.forward = forward  # type: ignore[method-assign]
    plan = plan_request(config_of(anchor), anchor.ranks, "a100-80gb")
    return predict(plan.query(cache=False))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", default="", help="part of the names of the rows")
    asked = arguments.parse_args()
    anchors = [anchor for anchor in ANCHORS if asked.only in anchor.name]
    with processes() as run:
        answers = [run(predict_anchor, one) for one in anchors]
        print("| run | how | published | predicted: allocated | error | reserved | source |")
        print("|---|---|---|---|---|---|---|")
        for one, told in zip(anchors, answers, strict=True):
            peak = told.result().configured
            error = peak.allocated / (one.published * one.unit) - 1
            unit = "GiB" if one.unit == GIB else "GB"
            cells = (
                one.name,
                one.note,
                f"{one.published} {unit}",
                f"{peak.allocated / one.unit:.1f} {unit}",
                f"{error:+.1%}",
                f"{peak.reserved / one.unit:.1f} {unit}",
                one.source,
            )
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
