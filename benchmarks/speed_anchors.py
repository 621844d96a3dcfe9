"""Predicted throughputs beside published ones.

    python benchmarks/speed_anchors.py                   # about ten minutes on two cores
    python benchmarks/speed_anchors.py --traces FOLDER   # keeps the traces there, to compare again in seconds

What was published was measured by others, on their machines, with the software of their time. No constant of
the time model comes from these tables (see ``planner/speed/devices.py``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import mosaic
from comparing import rank_correlation
from omegaconf import OmegaConf

from torchtune_adaptive.planner.speed.devices import SPEEDS, with_power
from torchtune_adaptive.planner.speed.operations import StepOperations, packed_up, unpacked
from torchtune_adaptive.planner.speed.speed import Pace, Speed
from torchtune_adaptive.planner.workers import processes
from torchtune_adaptive.recipe.registry import find_config
from torchtune_adaptive.recipe.settings.asked import Asked

WHOLE_LOSS = {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}
CHUNKED = {"loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}}
CHECKPOINTED = {"enable_activation_checkpointing": True}
EVERY_SECOND = {"adaptive_batching": {"activation_checkpointing": "every_2"}}
OFFLOADED = {"enable_activation_offloading": True}
IN_BACKWARD = {"optimizer_in_bwd": True, "clip_grad_norm": None}
CLIPPED = {"clip_grad_norm": 1.0}
FUSED_ADAMW = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5, "fused": True}}
ONE_MICRO_BATCH = {"gradient_accumulation_steps": 1}
BARE = {
    "enable_activation_checkpointing": False,
    "enable_activation_offloading": False,
    "optimizer_in_bwd": False,
    "clip_grad_norm": None,
    **FUSED_ADAMW,
    **ONE_MICRO_BATCH,
}
ADAPTERS = {"enable_activation_offloading": False, **FUSED_ADAMW, **ONE_MICRO_BATCH, **CHUNKED}
RANK_8_QV = {
    "model": {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": False, "lora_rank": 8}
}

THREE_B, THREE_B_LORA = "llama3_2/3B_full_single_device", "llama3_2/3B_lora_single_device"
THREE_B_QLORA = "llama3_2/3B_qlora_single_device"
EIGHT_B, EIGHT_B_LORA = "llama3_1/8B_full", "llama3_1/8B_lora_single_device"
EIGHT_B_QLORA = "llama3_1/8B_qlora_single_device"
SEVEN_B, THIRTEEN_B = "llama2/7B_full", "llama2/13B_full"

# The H100 of torchtitan's benchmarks: 96 GB of HBM2e with 2.4 TB/s, 500 W instead of 700.
TITAN_H100 = replace(with_power(SPEEDS["h100-80gb"], "h100-96gb-500w", 500 / 700), bandwidth=2.4e12)
DEVICES = {**SPEEDS, TITAN_H100.name: TITAN_H100}

TABLES = {
    "torchtune-3B": "torchtune, README of November 2024 (commit 1814feb17): Llama 3.2 3B, packed rows",
    "torchtune-8B": "torchtune, README of September 2024 (commit 30b8519e8): Llama 3.1 8B, packed rows",
    "titan-H100": "torchtitan, benchmarks/llama3_h100_202412: Llama 3.1 8B, FSDP2, rows of 8192",
    "titan-A100": "torchtitan, docs/performance.md of 2024 (commit 157a12c56): Llama 2 13B, FSDP2",
    "fms": "fms-fsdp, README: Llama 2 7B, HSDP",
}


@dataclass(frozen=True)
class Anchor:
    table: str
    name: str
    published: float
    """Tokens/s of one GPU."""
    device: str
    config: str
    changes: tuple[dict[str, Any], ...]
    rows: int = 2
    length: int = 4096
    ranks: int = 1
    compiled: bool = True
    quantized: bool = False
    differs: str = ""
    """Reason why the prediction need not be within 10 %."""
    note: str = ""
    """Difference that should not matter much."""


EVERY_SECOND_PRODUCT = "theirs repeats every second matrix product, ours all of every second layer"
A100, H100, RTX4090 = "a100-80gb", "h100-80gb", "rtx4090-24gb"
T3, T8 = "torchtune-3B", "torchtune-8B"
ANCHORS = [
    Anchor(T3, "full, eager", 7075, A100, THREE_B, (BARE, WHOLE_LOSS), compiled=False),
    Anchor(T3, "+ compile", 8998, A100, THREE_B, (BARE, WHOLE_LOSS)),
    Anchor(T3, "+ chunked loss", 9174, A100, THREE_B, (BARE, CHUNKED)),
    Anchor(T3, "+ checkpointing", 7210, A100, THREE_B, (BARE, CHUNKED, CHECKPOINTED)),
    Anchor(
        T3,
        "+ optimizer in backward",
        7309,
        A100,
        THREE_B,
        (BARE, CHUNKED, CHECKPOINTED, IN_BACKWARD),
    ),
    Anchor(
        *(T3, "+ offloading", 7301, A100, THREE_B),
        (BARE, CHUNKED, CHECKPOINTED, IN_BACKWARD, OFFLOADED),
    ),
    Anchor(T3, "LoRA", 8210, A100, THREE_B_LORA, (ADAPTERS, CHECKPOINTED, OFFLOADED)),
    Anchor(
        *(T3, "QLoRA", 8035, A100, THREE_B_QLORA, (ADAPTERS, CHECKPOINTED, OFFLOADED)),
        quantized=True,
    ),
    Anchor(
        T8, "LoRA", 3083, RTX4090, EIGHT_B_LORA, (ADAPTERS, CHECKPOINTED, RANK_8_QV), length=2048
    ),
    Anchor(
        *(T8, "QLoRA", 2413, RTX4090, EIGHT_B_QLORA, (ADAPTERS, CHECKPOINTED)),
        length=2048,
        quantized=True,
    ),
    Anchor(
        *("titan-H100", "eager", 5762, TITAN_H100.name, EIGHT_B),
        (BARE, WHOLE_LOSS, CLIPPED, EVERY_SECOND),
        note=EVERY_SECOND_PRODUCT,
        length=8192,
        ranks=8,
        compiled=False,
    ),
    Anchor(
        *("titan-H100", "compiled", 6667, TITAN_H100.name, EIGHT_B),
        (BARE, WHOLE_LOSS, CLIPPED, EVERY_SECOND),
        note=EVERY_SECOND_PRODUCT,
        length=8192,
        ranks=8,
    ),
    Anchor(
        *("titan-A100", "no checkpointing", 2162, A100, THIRTEEN_B, (BARE, WHOLE_LOSS, CLIPPED)),
        ranks=64,
        compiled=False,
    ),
    Anchor(
        *("titan-A100", "every second layer", 1914, A100, THIRTEEN_B),
        (BARE, WHOLE_LOSS, CLIPPED, EVERY_SECOND),
        ranks=64,
        compiled=False,
    ),
    Anchor("fms", "7B, A100", 4550, A100, SEVEN_B, (BARE, WHOLE_LOSS, CLIPPED), ranks=8),
    Anchor(
        *("fms", "7B, H100", 9600, H100, SEVEN_B, (BARE, WHOLE_LOSS, CLIPPED)),
        ranks=8,
        differs="early 2024, kernels before they used Hopper well: MFU 0.46, on A100 0.68",
    ),
]


@dataclass(frozen=True)
class Result:
    anchor: Anchor
    predicted: Speed

    @property
    def error(self) -> float:
        return self.predicted.tokens_per_second_per_gpu / self.anchor.published - 1


def config_of(anchor: Anchor) -> dict[str, Any]:
    loaded = OmegaConf.load(find_config(anchor.config))
    for key in ("loss", "optimizer"):
        if any(key in changes for changes in anchor.changes):
            del loaded[key]
    asked = {"device": "cuda", "compile": False, "batch_size": anchor.rows}
    merged: Any = OmegaConf.merge(loaded, asked, *anchor.changes)
    plain: Any = OmegaConf.to_container(merged, resolve=True)
    return plain


def traced(cfg: dict[str, Any], ranks: int, rows: int, length: int) -> dict[str, Any]:
    """The operations of a step; in a process of its own."""
    from torchtune_adaptive.recipe.tracing.tracer import Tracer

    tracer = Tracer(Asked.of(OmegaConf.create(cfg)), ranks)  # type: ignore[arg-type]
    tracer.take_step(2, length // 2)
    operations = tracer.take_step(rows, length).operations
    assert operations is not None
    return packed_up(operations)


def all_traces(
    traced: Callable[..., Any], wanted: Sequence[tuple[Any, ...]], folder: Path | None
) -> list[Any]:
    """What ``traced`` gives for each of the arguments, or what the folder has."""
    names = [hashlib.sha256(json.dumps(step).encode()).hexdigest()[:16] for step in wanted]
    found: dict[str, Any] = {}
    with processes("torchtune_adaptive.recipe.plan.preload") as run:
        asked = {}
        for name, step in zip(names, wanted, strict=True):
            path = folder / f"{name}.json" if folder else None
            if path and path.exists():
                found[name] = json.loads(path.read_text())
            elif name not in asked:
                asked[name] = run(traced, *step)
        for name, answer in asked.items():
            found[name] = answer.result()
            if folder:
                (folder / f"{name}.json").write_text(json.dumps(found[name]))
    return [found[name] for name in names]


def result(anchor: Anchor, step: StepOperations) -> Result:
    pace = Pace(DEVICES[anchor.device], anchor.ranks, anchor.compiled, anchor.quantized, "bfloat16")
    return Result(anchor, pace.speed(step, anchor.rows, anchor.length, 1))


def known(folder: Path | None) -> list[str]:
    """The rows that were known when the model was written; and what is not as good as it should be."""
    wanted = [(config_of(one), one.ranks, one.rows, one.length) for one in ANCHORS]
    steps = map(unpacked, all_traces(traced, wanted, folder))
    results = [result(*pair) for pair in zip(ANCHORS, steps, strict=True)]
    failed = []
    print("## Known rows\n")
    for table, source in TABLES.items():
        rows = [one for one in results if one.anchor.table == table]
        correlation = rank_correlation(
            [one.anchor.published for one in rows],
            [one.predicted.tokens_per_second_per_gpu for one in rows],
        )
        print(f"{source}. Rank correlation {correlation:.2f}.\n")
        print("| | GPU | ranks | published, tokens/s per GPU | predicted | error | |")
        print("|---|---|--:|--:|--:|--:|---|")
        for one in rows:
            anchor = one.anchor
            notes = ("quantized" * anchor.quantized, anchor.differs, anchor.note)
            note = "; ".join(filter(None, notes))
            print(
                f"| {anchor.name} | {anchor.device} | {anchor.ranks} | {anchor.published:,.0f} "
                f"| {one.predicted.tokens_per_second_per_gpu:,.0f} | {one.error:+.1%} | {note} |"
            )
            if abs(one.error) > 0.10 and not anchor.quantized and not anchor.differs:
                failed.append(f"{table}, {anchor.name}: {one.error:+.1%}")
        print()
        if correlation < 0.95:
            failed.append(f"{table}: rank correlation {correlation:.2f}")
    errors = [abs(one.error) for one in results]
    print(f"{len(errors)} rows: median error {median(errors):.1%}, maximum {max(errors):.1%}.")
    if median(errors) > 0.03:
        failed.append(f"median error {median(errors):.1%}")
    return failed


def once_blind(folder: Path | None) -> list[str]:
    """The rows that nobody had seen when the first model was written; and what is worse than it was."""
    traces = all_traces(mosaic.traced, [row.step for row in mosaic.ROWS], folder)
    steps = [mosaic.step_of(*pair) for pair in zip(mosaic.ROWS, traces, strict=True)]
    print(f"\n## Rows that were blind once\n\n{mosaic.SOURCE}.\n")
    print("| GPU | row | published | predicted | error | with the attention of then | error |")
    print("|---|---|--:|--:|--:|--:|--:|")
    today, then = [], []
    for row, step in zip(mosaic.ROWS, steps, strict=True):
        speeds = [mosaic.predicted(row, step, of_then) for of_then in (False, True)]
        for found, speed in zip((today, then), speeds, strict=True):
            found.append((speed.tokens_per_second_per_gpu / row.published - 1, speed.mfu))
        cells = (f"{s.tokens_per_second_per_gpu:,.0f}" for s in speeds)
        errors = (f"{found[-1][0]:+.1%}" for found in (today, then))
        each = " | ".join(f"{cell} | {error}" for cell, error in zip(cells, errors, strict=True))
        print(f"| {row.device} | {row.name} | {row.published:,.0f} | {each} |")
    print("\n| | median error | worst | rank correlation of MFU |\n|---|--:|--:|--:|")
    for name, found in (("kernels of today", today), ("attention of then", then)):
        errors, mfu = [abs(error) for error, _ in found], [each for _, each in found]
        real = [each / (1 + error) for error, each in found]
        correlation = rank_correlation(real, mfu)
        print(f"| {name} | {median(errors):.1%} | {max(errors):.1%} | {correlation:.2f} |")
    gap = difference_of_pairs([error for error, _ in then])
    print(
        f"\nPairs of rows with the same model and GPU: errors differ by {gap:.1%} (90 % quantile)."
    )
    checks = {
        f"median error {median(errors):.1%}": median(errors) <= 0.08,
        f"worst error {max(errors):.1%}": max(errors) <= 0.22,
        f"rank correlation of MFU {correlation:.2f}": correlation >= 0.9,
        f"errors of pairs differ by {gap:.1%}": gap <= Speed.CLOSE,
    }
    return [problem for problem, is_fine in checks.items() if not is_fine]


def difference_of_pairs(errors: Sequence[float]) -> float:
    """How far apart the errors of two rows with the same model and GPU are: 90 % quantile."""
    pairs = combinations(zip(mosaic.ROWS, errors, strict=True), 2)
    apart = [
        abs((1 + one_error) / (1 + other_error) - 1)
        for (one, one_error), (other, other_error) in pairs
        if (one.model, one.device) == (other.model, other.device)
    ]
    return quantiles(apart, n=10, method="inclusive")[-1]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--traces", type=Path, help="a folder to keep the traces in")
    asked = arguments.parse_args()
    if asked.traces:
        asked.traces.mkdir(parents=True, exist_ok=True)
    if failed := [*known(asked.traces), *once_blind(asked.traces)]:
        raise SystemExit("Not as good as it should be: " + "; ".join(failed))


if __name__ == "__main__":
    main()
