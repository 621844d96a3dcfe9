"""``docs/what-fits.md``, made from the answers in ``docs/results/what_fits.json``.

python docs/make/what_fits.py > docs/what-fits.md

``trace_what_fits.py`` finds the answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "what_fits.json"
LENGTHS = (2048, 8192)
ALIKE = ("enable_activation_checkpointing=True", "gradient_accumulation_steps=1")
"""Overrides of every config, whose own values differ from model to model."""
GPUS = {"4090": "RTX 4090", "a100-80": "A100 80 GB", "h100": "H100"}
RANKS = {1: tuple(GPUS), 8: ("h100",)}
"""The GPUs that are planned, by their number."""
Rows = dict[tuple[Any, ...], list[dict[str, Any]]]
_BYTES = {"QLoRA": 0.5, "LoRA": 2, "full": 8}
"""Bytes of a parameter that stay in memory, at the least: its weight, and its gradient and AdamW's state."""


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: str
    method: str
    config: str
    overrides: tuple[str, ...]
    billions: float
    """Parameters of the model."""

    def words(self) -> str:
        """The config and its overrides, as they are typed."""
        return " ".join((self.config, *self.overrides, *ALIKE))

    def resident(self, ranks: int) -> float:
        """Bytes that stay in a GPU's memory, at the least."""
        return self.billions * 1e9 * _BYTES[self.method] / ranks


def _cases() -> Iterator[Case]:
    of_32b = "model._component_=torchtune.models.qwen2_5.qwen2_5_32b_instruct"
    models: tuple[tuple[str, str, float, tuple[str, ...]], ...] = (
        # A name, what its configs begin with, billions of parameters, and the config of all weights.
        ("Llama 3.2 1B", "llama3_2/1B", 1.24, ("llama3_2/1B_full",)),
        ("Llama 3.2 3B", "llama3_2/3B", 3.21, ("llama3_2/3B_full",)),
        ("Llama 3.1 8B", "llama3_1/8B", 8.03, ("llama3_1/8B_full",)),
        ("Llama 3.3 70B", "llama3_3/70B", 70.6, ("llama3_3/70B_full", "fsdp_cpu_offload=False")),
        ("Qwen2.5 7B", "qwen2_5/7B", 7.62, ("qwen2_5/7B_full",)),
        ("Qwen2.5 32B", "qwen2_5/32B", 32.8, ("qwen2_5/7B_full", of_32b)),
    )
    for model, name, billions, (full, *changes) in models:
        yield Case(model, "QLoRA", f"{name}_lora", ("model.quantize_base=True",), billions)
        yield Case(model, "LoRA", f"{name}_lora", (), billions)
        yield Case(model, "full", full, tuple(changes), billions)


CASES = tuple(_cases())


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row of the answers is about."""
    return tuple(row[key] for key in ("model", "method", "ranks", "length"))


_HEAD = """# What fits

**Predicted, not measured.** Each cell is what `tune-adaptive plan` says: the largest micro-batch per GPU, and
tokens/s per GPU at that size. The answers for your own config, or a model of the Hub, take [minutes and no
GPU](planning.md).

- The real peak is taken to be within {memory} of the predicted one, on several GPUs {memories}. Where that
  decides, the size has a star: a trial on the device may find a smaller one. 5 % of the capacity stays free.
- The real speed is taken to be within {speed}, of QLoRA {quantized}. All tokens count, padding as well.
- *none*: not even one row fits. Where the weights (of full training, with gradients and AdamW's state) take
  more than the memory, that is arithmetic, and nothing was traced. With a
  star: one row may run if torch's allocator returns memory in the middle of a step (allocation retries).
- All with activation checkpointing, bf16 weights (QLoRA: NF4), AdamW, and one micro-batch in a step; nothing
  is compiled, and no size is searched for first: after a search memory is in fewer pieces, and a row more or
  less may fit. Several GPUs are FSDP2. Adapters have the rank of torchtune's config, which differs by model.
"""
_COMMANDS = """## The commands

    tune-adaptive plan {words} \\
        --gpu 4090 --seq-len 2048 --no-what-ifs batch_size={rows}

gives the first numbers of {model} with {method}: without `batch_size` it says how many rows fit, and with it,
how fast they are. The others are those of `--gpu a100-80`, `--gpu h100` and `--gpu h100 --nproc 8`, and of
these configs, each with {alike}:
"""
_TAIL = """
torchtune has no config for QLoRA on several GPUs but for 70B, and none for all weights of Qwen2.5 32B, so
overrides make them; and it has configs that take less, such as `llama3_1/8B_full_single_device` with an 8-bit
AdamW within the backward pass, and `llama3_3/70B_full` with parameters on the host. Plan these by name.

Made by `python docs/make/what_fits.py` from [results/what_fits.json](results/what_fits.json), which
`docs/make/trace_what_fits.py` completes.
"""


def page(kept: Sequence[dict[str, Any]]) -> str:
    """The page, as Markdown."""
    rows = {key_of(row): row["devices"] for row in kept}
    parts = [_head(rows)]
    for length in LENGTHS:
        parts += [f"## Rows of {length:,} tokens", "", *_table(rows, length), ""]
    parts.append(_commands(rows))
    parts += ["| | config and overrides |", "|---|---|"]
    for case in CASES:
        words = " ".join((case.config, *case.overrides))
        parts.append(f"| {case.model}, {case.method} | `{words}` |")
    return "\n".join((*parts, _TAIL))


def _head(rows: Rows) -> str:
    alone, several, lora, qlora = (
        rows[CASES[number].model, CASES[number].method, ranks, LENGTHS[0]][0]
        for number, ranks in ((1, 1), (1, 8), (1, 1), (0, 1))
    )
    return _HEAD.format(
        memory=_band(-alone["margin"][0], alone["margin"][1]),
        memories=_band(-several["margin"][0], several["margin"][1]),
        speed=_band(*lora["speed_margin"]),
        quantized=_band(*qlora["speed_margin"]),
    )


def _band(low: float, high: float) -> str:
    text = f"+-{high:.0%}" if -low == high else f"{low:+.0%} to {high:+.0%}"
    return text.replace("%", " %")


def _table(rows: Rows, length: int) -> Iterator[str]:
    names = [*GPUS.values(), *(f"8 x {GPUS[gpu]}" for gpu in RANKS[8])]
    yield "| | " + " | ".join(names) + " |"
    yield "|---|" + "--:|" * len(names)
    for case in CASES:
        found = [rows.get((case.model, case.method, ranks, length)) for ranks in RANKS]
        if any(found):
            cells = [
                _cell(one)
                for devices, gpus in zip(found, RANKS.values(), strict=True)
                for one in (devices or [None] * len(gpus))
            ]
            yield f"| {case.model}, {case.method} | " + " | ".join(cells) + " |"
    left: dict[str, list[str]] = {}
    for case in CASES:
        if any((*_name(case), ranks, length) not in rows for ranks in RANKS):
            left.setdefault(case.model, []).append(case.method)
    if left:
        names = [f"{model} ({', '.join(methods)})" for model, methods in left.items()]
        yield ""
        yield f"Not planned here, at least not on all of these GPUs: {', '.join(names)}."


def _name(case: Case) -> tuple[str, str]:
    return case.model, case.method


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return ""
    star = "*" if one.get("verdict") == "UNCERTAIN" else ""
    if not one["largest"]:
        return f"none{star}"
    speed = float(f"{one['tokens_per_second_per_gpu']:.3g}")
    return f"{one['largest']}{star}: {speed:,.0f}"


def _commands(rows: Rows) -> str:
    case = next(one for one in CASES if one.config == "llama3_1/8B_lora" and one.method == "LoRA")
    (first, *_) = rows[(*_name(case), 1, LENGTHS[0])]
    return _COMMANDS.format(
        words=case.words(),
        rows=first["largest"],
        model=case.model,
        method=case.method,
        alike=" and ".join(f"`{one}`" for one in ALIKE),
    )


def answers() -> list[dict[str, Any]]:
    """The rows that are known."""
    kept: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    return kept


if __name__ == "__main__":
    print(page(answers()), end="")
