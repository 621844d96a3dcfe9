"""The cells of the table of trainers: each a training of the plain trainer and of ours, on two ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests.integrations.real.trainers import (
    NAMES,
    Result,
    llama,
    lora,
    make,
    result,
    saved,
    texts,
    tokens,
)
from tests.integrations.real.ways import FSDP2, WAYS, fsdp2_on_cpu
from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive

CLOSE = 1e-6
LIMIT = 120.0
"""Seconds that the trainings of a cell may take."""
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "TRL's defaults": {"bf16": True, "gradient_checkpointing": True},
    "LoRA": {"adapters": True},
    "QLoRA": {"adapters": True, "quantized": True, "bf16": True},
    "packing": {"packing": True, "max_length": 16},
    "compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "evaluation": EVALUATED,
    "resume": {"save_strategy": "steps", "save_steps": 2},
    "callbacks": EVALUATED,
    "accumulation": {"gradient_accumulation_steps": 4},
    "accumulation, `sync_each_batch=False`": {"gradient_accumulation_steps": 4},
}
FOUND = {"memory_limit": "1GiB", "ceiling": 4}
"""Options with which a search finds the micro-batch that the plain trainer has."""


class Watching(TrainerCallback):  # type: ignore[misc]
    """Notes what callbacks see, and makes the trainer log, evaluate and stop where nothing else would."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.seen.append(("begin", state.global_step, state.epoch))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        of = [p.grad for p in named["model"].parameters() if p.grad is not None]
        local = [getattr(each, "to_local", lambda each=each: each)() for each in of]
        self.seen.append(("gradient", [float(each.double().sum()) for each in local]))

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.seen.append(("end", state.global_step, state.epoch))
        control.should_evaluate = state.global_step == 1
        control.should_training_stop = state.global_step == 3

    def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.seen.append(("evaluated", state.global_step, named["metrics"]["eval_loss"]))


def quantized(kind: str) -> Any:
    """A tiny Llama with weights of 4 bits."""
    import bitsandbytes
    from transformers import BitsAndBytesConfig

    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.float32,  # or FSDP2 has parameters of several types in a layer
    )
    # On some CPUs, a forward pass in evaluation mode would round the weights of what it packs for a kernel.
    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
    head = {"num_labels": 1} if kind == "LlamaForSequenceClassification" else {}
    with tempfile.TemporaryDirectory() as folder:
        return saved(llama(kind, **head), folder, quantization_config=bits, dtype=torch.float32)


def trained(
    trainer: str, way: str, setting: str, options: Adaptive | None, folder: str
) -> list[Result]:
    """A training, and where the setting says so, one that is resumed from its checkpoint."""
    settings = SETTINGS[setting] | WAYS[way]
    classifies = trainer == "reward"
    adapters = settings.pop("adapters", False)
    if settings.pop("quantized", False):
        kind = "LlamaForSequenceClassification" if classifies else "LlamaForCausalLM"
        settings["model"] = quantized(kind)
    if adapters:
        settings["peft_config"] = lora("SEQ_CLS" if classifies else "CAUSAL_LM")
    if adapters and trainer == "trainer":
        from peft import get_peft_model

        model, config = settings.pop("model", None) or llama(), settings.pop("peft_config")
        settings["model"] = get_peft_model(model, config)
    if "packing" in settings:
        settings["data"] = texts("text", count=200)
    if "eval_strategy" in settings:
        columns = NAMES.get(trainer, ("prompt",))
        rows = tokens(16) if trainer == "trainer" else texts(*columns, count=16)
        if trainer == "kto":
            rows = rows.add_column("label", [number % 3 > 0 for number in range(len(rows))])
        settings["eval_dataset"] = rows
    watching = Watching()
    if setting == "callbacks":
        settings["callbacks"] = [watching]
    if "gradient_accumulation_steps" not in settings:
        settings["gradient_accumulation_steps"] = 1
    made = make(trainer, options, folder, **settings)
    made.train()
    results = [result(made)]
    results[0].more["seen"] = watching.seen
    if setting == "resume":
        again = make(trainer, options, folder, **settings)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        results.append(result(again))
    return results


def far(one: Result, other: Result) -> float:
    """The largest difference of weights, of what was logged and of what callbacks saw; for numbers beyond
    1, relative. Equal to the bit is 0."""
    a, b = ((each.without_times(), each.more.get("seen")) for each in (one, other))
    if torch.equal(one.weights, other.weights) and repr(a) == repr(b):
        return 0.0
    x, y = (torch.tensor(numbers(each), dtype=torch.float64) for each in (a, b))
    x, y = torch.cat([x, one.weights.double()]), torch.cat([y, other.weights.double()])
    return max(float(((x - y).abs() / y.abs().clamp(min=1)).max()), 1e-300)


def numbers(value: Any) -> list[float]:
    """All numbers in what may be nested."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in numbers(each)]
    try:
        return [float(value)]
    except (TypeError, ValueError):
        return []


def beside(trainer: str, way: str, setting: str, folder: str) -> float | str:
    """How far ours is from the plain trainer, or why it is refused."""
    if way == "fsdp2":
        fsdp2_on_cpu()
    plain = trained(trainer, way, setting, None, f"{folder}/plain")
    more: dict[str, Any] = {"search": False} if setting == "compile" else FOUND
    if "sync_each_batch" in setting:
        more = more | {"sync_each_batch": False}
    try:
        ours = trained(trainer, way, setting, Adaptive(**more), f"{folder}/ours")
    except UsageError as refused:
        return str(refused)
    assert all(each.sizes == (4, 4) for each in ours), [each.sizes for each in ours]
    return max(far(*pair) for pair in zip(ours, plain, strict=True))


def alone(trainer: str, way: str, setting: str, folder: str) -> None:
    """The plain trainer."""
    if way == "fsdp2":
        fsdp2_on_cpu()
    trained(trainer, way, setting, None, folder)
