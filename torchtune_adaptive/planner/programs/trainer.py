"""A program that trains with a trainer of transformers or TRL, as settings say: ``trainer.py SETTINGS``.

It is planned as any program is, so that a trainer can be planned without a script. Its rows are made up, each
as long as it may be.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
import typing
from typing import Any

from torchtune_adaptive.common import NoPrediction
from torchtune_adaptive.planner.programs import made_up, notes
from torchtune_adaptive.planner.programs.request import CHECKPOINTED

_LOADING = ("dtype", "attn_implementation", "experts_implementation", "output_router_logits")
"""Settings of a model as it is loaded."""
_PROMPT = 512
"""Tokens of a prompt that texts are generated for, if not told."""


def main(text: str) -> None:
    """Train with settings, which are JSON."""
    settings = json.loads(text)
    name, folder = settings.pop("trainer"), settings.pop("folder")
    kind, config = _trainer(name)
    given = _sorted(settings, config)
    arguments, adapters = given["arguments"], given["adapters"]
    how = {**given["loading"], **_quantization(given["quantization"], given["loading"])}
    arguments |= {"output_dir": "out", "max_steps": 8, "save_strategy": "no", "report_to": "none"}
    if arguments.get("fsdp"):
        arguments["fsdp_config"] = {"fsdp_version": 2, "reshard_after_forward": True}
    one_row = arguments.get("padding_free") and not arguments.get("packing")
    if is_of_trl := name not in ("Trainer", "Seq2SeqTrainer"):
        arguments.setdefault("model_init_kwargs", how)
        if one_row:
            arguments["max_length"] = None  # nothing cuts off the end of a row that is not padded
    trained = config(**arguments)
    length = settings["max_length"]
    if "reward_funcs" in inspect.signature(kind).parameters:
        length = settings.get("max_prompt_length", _PROMPT)
    _note(length, settings, trained)
    of_step = trained.per_device_train_batch_size * trained.gradient_accumulation_steps
    kind_of_rows = name.removesuffix("Trainer").upper() if is_of_trl else "SFT"
    rows = made_up.rows(kind_of_rows, length, of_step, settings.get("padded", False))
    if is_of_trl:
        more: dict[str, Any] = {"processing_class": made_up.simple_tokenizer()}
        if adapters is not None:
            more["peft_config"] = _lora(adapters)
        if "reward_funcs" in inspect.signature(kind).parameters:
            more["reward_funcs"] = _reward
        if "teacher_model" in inspect.signature(kind).parameters:
            more["teacher_model"] = settings.get("teacher_model", folder)
            notes.note(f"teacher: {more['teacher_model']}")
        model = folder
    else:
        model, more = _model(folder, how, adapters, trained, settings), {}
    kind(model=model, args=trained, train_dataset=rows, **more).train()


def _note(length: int, settings: dict[str, Any], trained: Any) -> None:
    """Note what is trained, for people."""
    padding = "one of a batch is shorter" if settings.get("padded") else "without padding"
    notes.note(f"rows: made up, {length:,} tokens each, {padding}")
    notes.note(CHECKPOINTED if trained.gradient_checkpointing else "checkpointing: none")
    notes.note(f"optimizer: {getattr(trained.optim, 'value', trained.optim)}")


def _trainer(name: str) -> tuple[Any, Any]:
    """A trainer's class, and that of its arguments."""
    import transformers

    if name in ("Trainer", "Seq2SeqTrainer"):
        arguments = name.replace("Trainer", "TrainingArguments")
        return getattr(transformers, name), getattr(transformers, arguments)
    import trl

    for owner in (trl, _experimental(name)):
        if hasattr(owner, name):
            return getattr(owner, name), getattr(owner, name.replace("Trainer", "Config"))
    raise NoPrediction(f"trainer: {name!r} is not one of transformers or TRL. Use SFTTrainer, say.")


def _experimental(name: str) -> Any:
    """The module of TRL's experimental ones that has a trainer, as they are named; None if none may."""
    experimental = importlib.import_module("trl.experimental")
    kind = name.removesuffix("Trainer").lower()
    for found in pkgutil.iter_modules(experimental.__path__):
        if found.name.replace("_", "") == kind:
            return importlib.import_module(f"trl.experimental.{found.name}")
    return None


def _sorted(settings: dict[str, Any], config: Any) -> dict[str, Any]:
    """Settings by what they are of."""
    of_trainer, declared = inspect.signature(config).parameters, typing.get_type_hints(config)
    lora, bits = settings.get("lora"), settings.get("load_in_4bit") or settings.get("load_in_8bit")
    found: dict[str, Any] = {"arguments": {}, "adapters": {}, "quantization": {}, "loading": {}}
    known: dict[str, Any] = {"loading": _LOADING, "arguments": of_trainer}
    if lora:
        known["adapters"] = inspect.signature(importlib.import_module("peft").LoraConfig).parameters
    for name, value in settings.items():
        if name in _OURS and name not in of_trainer:
            continue
        if name.startswith(("load_in_", "bnb_", "llm_int8_")):
            found["quantization"][name] = value
            continue
        part = next((part for part, names in known.items() if name in names), None)
        if part is None:
            raise NoPrediction(
                f"{name}: {value!r}, but neither {config.__name__} nor the model or its adapters have such "
                "a setting. Leave it out."
            )
        if part == "arguments":
            value = _as_declared(value, declared.get(name))
        found[part][name] = value
    if not lora:
        found["adapters"] = None
    if not bits:
        found["quantization"] = {}
    return found


def _as_declared(value: Any, kind: Any) -> Any:
    """A value as the trainer's command line reads it, where 0 is 0.0 for what has to be a float."""
    kinds = typing.get_args(kind) or (kind,)
    return float(value) if type(value) is int and float in kinds and int not in kinds else value


_OURS = (
    *("max_length", "padded", "lora", "max_prompt_length", "prepare_for_kbit_training"),
    "teacher_model",
)
"""Settings that are none of a trainer's, unless it has them, too."""


def _quantization(settings: dict[str, Any], loading: dict[str, Any]) -> dict[str, Any]:
    """What loads a model with few bits, in the words of ``from_pretrained``."""
    if not settings:
        return {}
    from transformers import BitsAndBytesConfig

    if settings.get("load_in_4bit"):  # as TRL's own command has it
        compute_in = settings.get("bnb_4bit_compute_dtype") or loading.get("dtype", "float32")
        settings = {"bnb_4bit_quant_type": "nf4", **settings, "bnb_4bit_compute_dtype": compute_in}
    return {"quantization_config": BitsAndBytesConfig(**settings)}


def _lora(settings: dict[str, Any]) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings})


def _model(
    folder: str, how: dict[str, Any], adapters: Any, trained: Any, settings: dict[str, Any]
) -> Any:
    """The model of transformers' own trainers, which is prepared outside of them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_pretrained(folder, **how)
    if adapters is None:
        return model
    from peft import get_peft_model, prepare_model_for_kbit_training

    if "quantization_config" in how and settings.get("prepare_for_kbit_training", True):
        checkpoints = trained.gradient_checkpointing
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpoints)
    elif trained.gradient_checkpointing:
        model.enable_input_require_grads()
    return get_peft_model(model, _lora(adapters))


def _reward(completions: Any, **_: Any) -> list[float]:
    return [1.0] * len(completions)


if __name__ == "__main__":
    main(sys.argv[1])
