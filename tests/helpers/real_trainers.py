"""Peaks of the steps of transformers' Trainer and TRL's, planned and measured, as JSON.

A program for an environment that has these libraries, PEFT and ours: ``python real_trainers.py``. They are
imported where they are needed, since each process that traces imports this file.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from torchtune_adaptive import TransformersStep

LENGTH, VOCABULARY = 128, 8192
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "use_cache": False}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
SHAPE |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
PLAIN = {"trainer": "Trainer", "gradient_checkpointing": False, "per_device_train_batch_size": 4}
SFT = {"trainer": "SFTTrainer", "per_device_train_batch_size": 4}
DPO = {"trainer": "DPOTrainer", "per_device_train_batch_size": 2}
HALF = {"dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "Trainer in fp32": {**PLAIN, "bf16": False},
    "Trainer with some adapters": {
        **PLAIN,
        **HALF,
        "lora": True,
        "target_modules": ("q_proj", "v_proj"),
    },
    "SFT": SFT,
    "SFT with accumulation": {
        **SFT,
        **HALF,
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": 2,
    },
    "SFT with adapters": {
        **SFT,
        "lora": True,
        "lora_dropout": 0.1,
        "gradient_checkpointing": False,
    },
    "SFT with adapters and checkpointing": {**SFT, **HALF, "lora": True},
    "DPO": DPO,
    "DPO in bfloat16": {**DPO, **HALF},
    "DPO with adapters": {**DPO, **HALF, "lora": True},
    **{
        f"SFT with {name}": {**SFT, **HALF, "optim": name}
        for name in ("adamw_torch", "adafactor", "sgd", "adamw_8bit")
    },
    "Trainer with 32-bit moments": {**PLAIN, "bf16": False, "optim": "paged_adamw_32bit"},
}
OURS = ("trainer", "dtype", "lora", "lora_dropout", "target_modules")
"""Settings that the trainers' own arguments do not have."""


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", "word"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def rows_for(trainer: str) -> Any:
    """Rows that are all as long as may be."""
    from datasets import Dataset

    half, whole = " ".join(["word"] * (LENGTH // 2)), " ".join(["word"] * LENGTH)
    tokens = [3] * LENGTH
    row: dict[str, Any] = {
        "Trainer": {"input_ids": tokens, "attention_mask": [1] * LENGTH, "labels": tokens},
        "SFTTrainer": {"text": whole},
        "DPOTrainer": {"prompt": half, "chosen": f" {whole}", "rejected": f" {whole}"},
    }[trainer]
    return Dataset.from_list([row] * 16)


def measured(case: dict[str, Any]) -> int:
    """The peak of the third step of the real trainer."""
    import torch
    import transformers
    import trl
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from torchtune_adaptive.core.device.simulated import SimulatedMemory

    name, memory = case["trainer"], SimulatedMemory(1 << 40)
    dtype = getattr(torch, case.get("dtype", "float32"))
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype)
    arguments = {key: value for key, value in case.items() if key not in OURS}
    arguments |= {"bf16": case.get("bf16", True), "max_steps": 3, "use_cpu": True}
    arguments |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    more: dict[str, Any] = {}
    if case.get("lora"):
        targets = case.get("target_modules", "all-linear")
        targets = targets if isinstance(targets, str) else list(targets)
        adapters = LoraConfig(lora_dropout=case.get("lora_dropout", 0.0), target_modules=targets)
        if name == "Trainer":
            model = get_peft_model(model, adapters)
        else:
            more["peft_config"] = adapters
    elif name == "DPOTrainer":
        more["ref_model"] = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype)
    if name != "Trainer":
        arguments["max_length"] = LENGTH
        more["processing_class"] = tokenizer()

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gc.collect()
            memory.watch()

    kinds = {
        "Trainer": (transformers.Trainer, transformers.TrainingArguments),
        "SFTTrainer": (trl.SFTTrainer, trl.SFTConfig),
        "DPOTrainer": (trl.DPOTrainer, trl.DPOConfig),
    }
    kind, config = kinds[name]
    trainer = kind(
        model=model,
        args=config("out", **arguments),
        train_dataset=rows_for(name),
        callbacks=[Watch()],
        **more,
    )
    for each in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        memory.adopt([*each.parameters(), *each.buffers()])
    with memory.running():
        trainer.train()
    return memory.usage().peak_bytes


def planned(case: dict[str, Any], folder: Path) -> int:
    step = TransformersStep(folder=str(folder), max_length=LENGTH, **case)
    rows = step.per_device_train_batch_size
    return step.plan(gpu="cpu", memory="1TiB", ceiling=rows).peak


def main() -> None:
    folder = Path("model")
    folder.mkdir()
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE}
    (folder / "config.json").write_text(json.dumps(about))
    results = {name: (planned(case, folder), measured(case)) for name, case in CASES.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
