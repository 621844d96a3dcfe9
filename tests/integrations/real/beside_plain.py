"""The cells of ``docs/results/trainer_table.md``: the plain trainer and ours, on two ranks."""

from __future__ import annotations

import math
import re
import tempfile
from typing import Any

import torch
from peft import get_peft_model
from transformers import TrainerCallback

from tests.integrations.real.models import of_experts
from tests.integrations.real.trainers import (
    LOGGED,
    NAMES,
    Result,
    llama,
    lora,
    make,
    on_ranks,
    result,
    saved,
    texts,
    tokens,
)
from tests.integrations.real.ways import WAYS, fsdp2_on_cpu
from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive

CLOSE = 1e-6
LIMIT = 120.0
"""Seconds that the trainings of a cell may take."""
FOUND = {"memory_limit": "1GiB", "ceiling": 4}
"""Options with which a search finds the micro-batch that the plain trainer has."""
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "one batch in a step": {},
    "bf16, checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "LoRA": {"adapters": True},
    "QLoRA": {"adapters": True, "quantized": True, "bf16": True},
    "packing": {"packing": True, "max_length": 16},
    "compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "evaluation": EVALUATED,
    "resume": {"save_strategy": "steps", "save_steps": 2},
    "callbacks": EVALUATED,
    "accumulation": {"gradient_accumulation_steps": 4},
    "accumulation, reduced once": {"gradient_accumulation_steps": 4},
    "accumulation, larger": {"gradient_accumulation_steps": 4},
    "experts": {"gradient_accumulation_steps": 2},
    "loss of a batch": {"gradient_accumulation_steps": 2},
}
OF_A_BATCH = {"dpo": "aot", "kto": "kto", "grpo": "bnpo"}
"""Losses of trainers over a whole batch."""
OPTIONS: dict[str, dict[str, Any]] = {
    "compile": {"search": False},  # what is compiled runs eager where memory is limited on a CPU
    "accumulation, reduced once": FOUND | {"sync_each_batch": False},
    "accumulation, larger": {"memory_limit": "1GiB"},
}
"""Options of a setting, where they are others than ``FOUND``."""


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
    # On some CPUs, weights would be packed in evaluation for a kernel that has no gradient.
    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
    head = {"num_labels": 1} if kind == "LlamaForSequenceClassification" else {}
    with tempfile.TemporaryDirectory() as folder:
        return saved(llama(kind, **head), folder, quantization_config=bits, dtype=torch.float32)


def settings_of(trainer: str, way: str, setting: str) -> dict[str, Any]:
    """What a trainer is made with."""
    settings = {"gradient_accumulation_steps": 1} | SETTINGS[setting] | WAYS[way]
    classifies = trainer == "reward"
    if settings.pop("quantized", False):
        kind = "LlamaForSequenceClassification" if classifies else "LlamaForCausalLM"
        settings["model"] = quantized(kind)
    if setting == "experts":
        settings |= of_experts(trainer, "Qwen3MoeForCausalLM")
        if way == "fsdp2":
            layers = {"transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"]}
            settings["fsdp_config"] = settings["fsdp_config"] | layers
    if setting == "loss of a batch":
        settings["loss_type"] = OF_A_BATCH[trainer]
    if settings.pop("adapters", False):
        config = lora("SEQ_CLS" if classifies else "CAUSAL_LM")
        if trainer == "trainer":
            settings["model"] = get_peft_model(settings.get("model") or llama(), config)
        else:
            settings["peft_config"] = config
    if "packing" in settings:
        settings["data"] = texts("text", count=200)
    if "eval_strategy" in settings:
        rows = (
            tokens(16)
            if trainer == "trainer"
            else texts(*NAMES.get(trainer, ("prompt",)), count=16)
        )
        if trainer == "kto":
            rows = rows.add_column("label", [number % 3 > 0 for number in range(len(rows))])
        settings["eval_dataset"] = rows
    return settings


def trained(
    trainer: str, way: str, setting: str, options: Adaptive | None, folder: str
) -> list[Result]:
    """The result of a training and, of ``resume``, that of one that goes on from its checkpoint."""
    if way == "fsdp2":
        fsdp2_on_cpu()
    found = []
    for checkpoint in [None, f"{folder}/checkpoint-2"][: 2 if setting == "resume" else 1]:
        settings = settings_of(trainer, way, setting)
        watching = Watching()
        if setting == "callbacks":
            settings["callbacks"] = [watching]
        made = make(trainer, options, folder, **settings)
        made.train(resume_from_checkpoint=checkpoint)
        found.append(result(made))
        found[-1].more["seen"] = watching.seen
    return found


def beside_plain(trainer: str, way: str, setting: str, folder: str) -> float | str:
    """How far ours is from the plain trainer, or why it is refused."""
    plain = trained(trainer, way, setting, None, f"{folder}/plain")
    options = Adaptive(**OPTIONS.get(setting, FOUND))
    try:
        ours = trained(trainer, way, setting, options, f"{folder}/ours")
    except UsageError as refused:
        return str(refused)
    assert all(
        (each.sizes == (4, 4)) == (options.ceiling == 4 or not options.search) for each in ours
    )
    names = LOGGED if setting == "accumulation, larger" else ()
    return max(far(*pair, *names) for pair in zip(ours, plain, strict=True))


def far(one: Result, other: Result, *names: str) -> float:
    """The largest difference of weights, of what callbacks saw, and of what was logged: all of it, or what
    has these names. It is relative for numbers beyond 1, and 0 only if all is equal to the bit."""
    a, b = (
        (each.column(*names) if names else each.without_times(), each.more["seen"])
        for each in (one, other)
    )
    bits = [
        each.weights.view(torch.int32) for each in (one, other)
    ]  # of 4-bit weights, some are NaN
    if torch.equal(*bits) and repr(a) == repr(b):
        return 0.0
    x, y = (
        torch.cat([torch.tensor(numbers(of), dtype=torch.float64), each.weights.double()])
        for of, each in ((a, one), (b, other))
    )
    return float(((x - y).abs() / y.abs().clamp(min=1)).max()) or math.inf


def numbers(value: Any) -> list[float]:
    """All numbers in what may be nested."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in numbers(each)]
    return [float(value)] if isinstance(value, (int, float)) else []


def outcome(trainer: str, way: str, setting: str) -> tuple[str, str]:
    """What a cell says, and why where that needs a reason."""
    with tempfile.TemporaryDirectory() as folder:
        cell = (trainer, way, setting)
        try:
            seen = on_ranks(beside_plain, 2, *cell, folder, timeout=LIMIT)
        except AssertionError as failed:
            try:
                on_ranks(trained, 2, *cell, None, f"{folder}/alone", timeout=LIMIT)
            except AssertionError as alone:
                return "the plain trainer fails", last_error(alone)
            return "fails", last_error(failed)
    refused = [each for each in seen if isinstance(each, str)]
    if refused:
        return "refused", refused[0]
    return in_words(max(seen)), ""


def in_words(most: float) -> str:
    """A difference, rounded up."""
    if most == 0:
        return "equal"
    if not math.isfinite(most):
        return "differs"
    exponent = math.floor(math.log10(most))
    return "1e-6" if most <= CLOSE else f"{math.ceil(most / 10**exponent)}e{exponent}"


def last_error(failed: AssertionError) -> str:
    """What a rank has died of, or that it was not done in time."""
    lines = [line for line in str(failed).splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
    return (lines or str(failed).splitlines())[0]
