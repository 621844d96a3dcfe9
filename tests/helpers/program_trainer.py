"""A program that trains a case of ``real_trainers``: ``program_trainer.py FOLDER CASE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def quantization_of(settings: dict[str, Any]) -> Any:
    """The config of a model whose weights have few bits."""
    import torch
    from transformers import BitsAndBytesConfig

    if settings.get("load_in_8bit"):
        return BitsAndBytesConfig(load_in_8bit=True)
    compute_in = settings.get("bnb_4bit_compute_dtype") or settings["dtype"]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, compute_in),
        bnb_4bit_use_double_quant=settings.get("bnb_4bit_use_double_quant", False),
        bnb_4bit_quant_storage=settings.get("bnb_4bit_quant_storage"),
    )


def main(folder: str, case: str) -> None:
    import real_trainers as real
    import torch
    from transformers import AutoModelForCausalLM

    settings = real.CASES[case]
    name = settings["trainer"]
    length = settings.get("length", real.LENGTH)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    how: dict[str, Any] = {}
    if settings.get("packing") or settings.get("padding_free"):
        how["attn_implementation"] = "flash_attention_2"
    if experts := settings.get("experts_implementation"):
        how["experts_implementation"] = experts
    if real.is_quantized(settings):
        how["quantization_config"] = quantization_of(settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how)
    arguments = {key: value for key, value in settings.items() if key not in real.OURS}
    arguments |= {"bf16": settings.get("bf16", True), "max_steps": 4, "save_strategy": "no"}
    arguments.pop("ranks", 1)
    if settings.get("fsdp"):
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        arguments["fsdp_config"] = {"fsdp_version": 2, "reshard_after_forward": True, **layers}
    more: dict[str, Any] = {}
    if settings.get("lora"):
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

        targets = settings.get("target_modules", "all-linear")
        adapters = LoraConfig(
            lora_dropout=settings.get("lora_dropout", 0.0),
            target_modules=targets if isinstance(targets, str) else list(targets),
            target_parameters=settings.get("target_parameters"),
        )
        if name == "Trainer":
            if real.is_quantized(settings) and settings.get("prepare_for_kbit_training", True):
                model = prepare_model_for_kbit_training(model)
            elif settings["gradient_checkpointing"]:
                model.enable_input_require_grads()
            model = get_peft_model(model, adapters)
        else:
            more["peft_config"] = adapters
    elif name == "DPOTrainer":
        more["ref_model"] = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if name != "Trainer":
        arguments["max_length"] = None if settings.get("padding_free") else length
        more["processing_class"] = real.tokenizer()
    kind, config = real.trainer_and_arguments(name)
    rows = real.rows_for(name, length - bool(settings.get("padding_free")))
    trainer = kind(model=model, args=config("out", **arguments), train_dataset=rows, **more)
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
