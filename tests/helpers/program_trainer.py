"""A program that trains a case of ``real_trainers``: ``program_trainer.py FOLDER CASE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


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
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how)
    arguments = {key: value for key, value in settings.items() if key not in real.OURS}
    arguments |= {"bf16": settings.get("bf16", True), "max_steps": 4, "save_strategy": "no"}
    arguments.pop("ranks", 1)
    if settings.get("fsdp"):
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        arguments["fsdp_config"] = {"fsdp_version": 2, "reshard_after_forward": True, **layers}
    more: dict[str, Any] = {}
    if settings.get("lora"):
        from peft import LoraConfig, get_peft_model

        targets = settings.get("target_modules", "all-linear")
        adapters = LoraConfig(
            lora_dropout=settings.get("lora_dropout", 0.0),
            target_modules=targets if isinstance(targets, str) else list(targets),
            target_parameters=settings.get("target_parameters"),
        )
        if name == "Trainer":
            if settings["gradient_checkpointing"]:
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
