"""How far estimates by arithmetic are from traced peaks, for the steps of transformers' and TRL's trainers.

    python benchmarks/trainer_estimate.py --minutes 60

Traced peaks are kept in ``docs/results/trainer_estimate.json`` as they are found, so it can be stopped, and
continues where it was; what is printed compares all that are there. Each model is planned with each of the
settings below, with 1 row of 1,024 tokens and with 8. It needs transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comparing import summary

from torchtune_adaptive import TransformersStep
from torchtune_adaptive.common import table

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "trainer_estimate.json"
HEADER = ("model", "step", "GPUs", "rows", "estimate, GiB", "traced, GiB", "difference")
GPU, MEMORY, LENGTH, ROWS = "h200", "4000GiB", 1024, (1, 8)
"""More memory than there is: what is asked is the peak."""


def _shape(
    kind: str,
    embed: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    words: int,
    tied: bool = False,
) -> dict[str, Any]:
    """A model's ``config.json``. ``heads``: of queries, of keys, and the width of one."""
    names = {"qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
    return {
        "model_type": kind,
        "architectures": [f"{names.get(kind, kind.capitalize())}ForCausalLM"],
        "hidden_size": embed,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": words,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
    }


MODELS = {
    "Llama-3.1-8B": _shape("llama", 4096, 14336, 32, (32, 8, 128), 128256),
    "Llama-3.2-1B": _shape("llama", 2048, 8192, 16, (32, 8, 64), 128256, tied=True),
    "Mistral-7B": _shape("mistral", 4096, 14336, 32, (32, 8, 128), 32768),
    "Qwen2.5-0.5B": _shape("qwen2", 896, 4864, 24, (14, 2, 64), 151936, tied=True),
    "Qwen3-8B": _shape("qwen3", 4096, 12288, 36, (32, 8, 128), 151936),
    "SmolLM3-3B": _shape("smollm3", 2048, 11008, 36, (16, 4, 128), 128256, tied=True),
}
_HALF: dict[str, Any] = {"dtype": "bfloat16"}
_LORA: dict[str, Any] = {**_HALF, "lora": True, "r": 16}
_PLAIN: dict[str, Any] = {"trainer": "Trainer", "gradient_checkpointing": False}
STEPS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, bf16": _HALF,
    "full, bf16, padded": {**_HALF, "padded": True},
    "full, bf16, 4 micro-batches": {**_HALF, "gradient_accumulation_steps": 4},
    "full, bf16, all kept": {**_HALF, "gradient_checkpointing": False, "optim": "adamw_torch"},
    "full, DDP": {"ranks": 4},
    "full, FSDP": {"ranks": 8, "fsdp": True},
    "full, Trainer": _PLAIN,
    "full, Trainer, float32": {**_PLAIN, "bf16": False},
    "full, Trainer, FSDP": {**_PLAIN, "ranks": 8, "fsdp": True},
    "full, bf16, 8-bit AdamW": {**_HALF, "optim": "adamw_8bit"},
    "full, paged 8-bit AdamW": {"optim": "paged_adamw_8bit", "padded": True},
    "full, bf16, packed": {**_HALF, "packing": True},
    "LoRA": {"lora": True, "r": 16, "padded": True},
    "LoRA, bf16": _LORA,
    "LoRA, bf16, all kept": {
        **_LORA,
        "gradient_checkpointing": False,
        "target_modules": ("q_proj", "v_proj"),
    },
    "LoRA, bf16, FSDP": {**_LORA, "ranks": 4, "fsdp": True},
    "LoRA, bf16, dropout": {**_LORA, "lora_dropout": 0.05, "optim": "adamw_8bit"},
    "QLoRA, dropout": {
        **_LORA,
        "load_in_4bit": True,
        "lora_dropout": 0.05,
        "optim": "paged_adamw_8bit",
    },
    "QLoRA": {**_LORA, "load_in_4bit": True, "padded": True},
    "QLoRA, Trainer": {**_LORA, "load_in_4bit": True, "trainer": "Trainer"},
    "DPO, LoRA, bf16": {**_LORA, "trainer": "DPOTrainer"},
}


@contextmanager
def steps() -> Iterator[dict[str, TransformersStep]]:
    """All steps, by ``model; settings; rows``."""
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in MODELS.items():
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(shape))
        yield {
            f"{name}; {way}; {rows}": TransformersStep(
                folder=str(Path(folder) / name),
                per_device_train_batch_size=rows,
                max_length=LENGTH,
                **settings,
            )
            for name in MODELS
            for way, settings in STEPS.items()
            for rows in ROWS
        }


def complete(minutes: float) -> None:
    """Trace what is missing, until the time is up."""
    kept, end = answers(), time.monotonic() + 60 * minutes
    with steps() as every, tempfile.TemporaryDirectory() as cache:
        for name, step in every.items():
            if name in kept or time.monotonic() > end:
                continue
            kept[name] = step.plan(gpu=GPU, memory=MEMORY, ceiling=ROWS[-1], cache=cache).peak
            RESULTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
            print(name, file=sys.stderr, flush=True)


def answers() -> dict[str, int]:
    """The traced peaks that are known."""
    found: dict[str, int] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return found


def compared() -> Iterator[tuple[str, TransformersStep, int, int]]:
    """The name of a step, the step, and the bytes that are estimated and traced for it."""
    kept = answers()
    with steps() as every:
        for name, step in every.items():
            if name in kept:
                about = step.estimated()
                assert about is not None, name
                yield name, step, about, kept[name]


def errors() -> list[float]:
    """The differences, as shares of what is traced."""
    return [about / exact - 1 for *_, about, exact in compared()]


def report() -> Iterator[str]:
    """What is printed."""
    lines = [
        (
            *name.split("; ")[:2],
            str(step.ranks),
            str(step.per_device_train_batch_size),
            *(f"{nbytes / 2**30:.2f}" for nbytes in (about, exact)),
            f"{about / exact - 1:+.1%}",
        )
        for name, step, about, exact in compared()
    ]
    yield from table(HEADER, lines, right={2, 3, 4, 5, 6})
    yield ""
    yield summary(errors())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="the most time that this takes")
    complete(parser.parse_args().minutes)
    print("\n".join(report()))
