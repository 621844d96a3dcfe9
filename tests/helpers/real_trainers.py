"""Peaks of the steps of transformers' Trainer and TRL's, planned and measured, as JSON.

A program for an environment that has these libraries, PEFT and ours: ``python real_trainers.py``, beside
``fsdp2_on_cpu.py`` and ``real_quantized.py``. They are imported where they are needed, since each process
that traces imports this file.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
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
FP16 = {"bf16": False, "fp16": True}
HALF = {"dtype": "bfloat16"}
LIGER = {"use_liger_kernel": True}
QLORA = {**HALF, "lora": True, "load_in_4bit": True}
EIGHT_BITS = {**HALF, "lora": True, "load_in_8bit": True}
SHARDED = {"ranks": 2, "fsdp": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
EXPERTS |= {"router_aux_loss_coef": 0.01, "head_dim": 32, "vocab_size": 256}
"""What a mixture of experts has besides, by the names of Qwen3-MoE: its peak is where experts run."""
MOE = {"model_type": "qwen3_moe"}
WINDOW = {"length": 256, "sliding_window": 64, "head_dim": 32, "vocab_size": 512}
"""Rows that are longer than what a layer sees, so attention has a mask."""
ONE_BY_ONE = {**PLAIN, **MOE, "experts_implementation": "eager", "bf16": False, "optim": "sgd"}
EVEN, WORST = {"routing": "even"}, {"routing": "worst"}
CASES: dict[str, dict[str, Any]] = {  # those of Liger last: it replaces functions of whole modules
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
    "SFT with a window": {
        **SFT,
        **HALF,
        **WINDOW,
        "model_type": "mistral",
        "gradient_checkpointing": False,
    },
    "SFT with a window, checkpointing and adapters": {
        **SFT,
        **HALF,
        **WINDOW,
        "model_type": "phi3",
        "lora": True,
    },
    "Trainer with a window in some layers": {
        **PLAIN,
        **WINDOW,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    "Trainer with a window in every second layer": {
        **PLAIN,
        **HALF,
        **WINDOW,
        "model_type": "gemma2",
    },
    "DPO with a window": {**DPO, **HALF, **WINDOW, "model_type": "gemma3_text"},
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
    "SFT with packing": {**SFT, **HALF, "packing": True, "gradient_checkpointing": False},
    "SFT in one row": {**SFT, **HALF, "padding_free": True, "gradient_checkpointing": False},
    "Trainer in fp16": {**PLAIN, **FP16},
    "SFT in fp16": {**SFT, **FP16},
    "SFT in fp16 with adapters": {**SFT, **FP16, "dtype": "float16", "lora": True},
    "Trainer with QLoRA": {
        **PLAIN,
        **QLORA,
        "gradient_checkpointing": True,
        "bnb_4bit_use_double_quant": True,
    },
    "Trainer with QLoRA as Axolotl and LLaMA-Factory have it": {
        **PLAIN,
        **QLORA,
        "gradient_checkpointing": True,
        "bnb_4bit_use_double_quant": True,
        "prepare_for_kbit_training": False,
    },
    "SFT with QLoRA": {**SFT, **QLORA, "bnb_4bit_use_double_quant": True, "lora_dropout": 0.1},
    "SFT with QLoRA in float32": {**SFT, **QLORA, "dtype": "float32"},
    "SFT with QLoRA and no checkpointing": {**SFT, **QLORA, "gradient_checkpointing": False},
    "DPO with QLoRA": {**DPO, **QLORA},
    "Trainer with 8 bits": {**PLAIN, **EIGHT_BITS, "gradient_checkpointing": True},
    "Trainer with 8 bits whose layers take most": {
        **PLAIN,
        **EIGHT_BITS,
        "gradient_checkpointing": True,
        "vocab_size": 256,
    },
    "Trainer with 8 bits in fp16": {
        **PLAIN,
        **EIGHT_BITS,
        **FP16,
        "dtype": "float16",
        "prepare_for_kbit_training": False,
    },
    "SFT with 8 bits": {**SFT, **EIGHT_BITS, "lora_dropout": 0.1},
    "SFT with 8 bits in float32": {**SFT, **EIGHT_BITS, "dtype": "float32"},
    "SFT with 8 bits and no checkpointing": {**SFT, **EIGHT_BITS, "gradient_checkpointing": False},
    "SFT with 8 bits and biases": {**SFT, **EIGHT_BITS, "model_type": "qwen2"},
    "DPO with 8 bits": {**DPO, **EIGHT_BITS},
    **{
        f"{name} and reentrant checkpointing": {
            **case,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        }
        for name, case in (
            ("Trainer in fp32", {**PLAIN, "bf16": False}),
            ("Trainer with adapters", {**PLAIN, **HALF, "lora": True}),
            ("Trainer with QLoRA", {**PLAIN, **QLORA}),
            ("SFT with accumulation", {**SFT, **HALF, "gradient_accumulation_steps": 2}),
            ("SFT with adapters", {**SFT, **HALF, "lora": True, "lora_dropout": 0.1}),
            ("DPO with adapters", {**DPO, **HALF, "lora": True}),
        )
    },
    "SFT on two ranks": {**SFT, **SHARDED},
    "SFT with adapters on two ranks": {**SFT, **SHARDED, **HALF, "lora": True},
    "SFT with QLoRA on two ranks": {**SFT, **SHARDED, **QLORA, "bnb_4bit_use_double_quant": True},
    **{
        f"{name} that is shared": {**case, **SHARDED, **QLORA, "bnb_4bit_quant_storage": "bfloat16"}
        for name, case in (
            ("SFT with QLoRA", SFT),
            ("SFT with QLoRA and no checkpointing", {**SFT, "gradient_checkpointing": False}),
            ("Trainer with QLoRA", {**PLAIN, "gradient_checkpointing": True}),
            ("DPO with QLoRA", DPO),
        )
    },
    "SFT with DDP": {**SFT, "ranks": 2},
    "SFT with DDP and adapters": {**SFT, **HALF, "lora": True, "ranks": 2},
    "Trainer with DDP and accumulation": {
        **PLAIN,
        **HALF,
        "ranks": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "Trainer with DDP whose optimizer takes most": {
        **PLAIN,
        "bf16": False,
        "optim": "adamw_torch",
        "ranks": 2,
        "per_device_train_batch_size": 1,
    },
    "Trainer with 32-bit moments": {**PLAIN, "bf16": False, "optim": "paged_adamw_32bit"},
    "Trainer with experts": {**PLAIN, **MOE, **EVEN, "bf16": False},
    "Trainer with experts at worst": {**PLAIN, **MOE, **WORST, "bf16": False},
    "Trainer with experts in batches": {
        **PLAIN,
        **MOE,
        **WORST,
        **HALF,
        "experts_implementation": "batched_mm",
    },
    "Trainer with experts one by one": {**ONE_BY_ONE, **EVEN},
    "Trainer with experts one by one at worst": {**ONE_BY_ONE, **WORST},
    "Trainer with experts that balances them": {**PLAIN, **MOE, **HALF, "balanced": True},
    "SFT with experts": {**SFT, **MOE, **EVEN},
    "SFT with experts in bfloat16 at worst": {**SFT, **MOE, **HALF, **WORST},
    "SFT with experts one by one at worst": {
        **SFT,
        **MOE,
        **HALF,
        **WORST,
        "experts_implementation": "eager",
        "gradient_checkpointing": False,
    },
    "SFT with experts and no balance": {**SFT, **MOE, **HALF, "router_aux_loss_coef": 0.0},
    "SFT with experts that have adapters": {**SFT, **MOE, **HALF, **WORST, "lora": True},
    "SFT with adapters beside experts": {
        **SFT,
        **MOE,
        **HALF,
        "lora": True,
        "target_modules": ("q_proj", "v_proj"),
        "gradient_checkpointing": False,
    },
    "SFT with adapters of parameters": {
        **SFT,
        **MOE,
        **HALF,
        "lora": True,
        "target_modules": ("q_proj", "v_proj"),
        "target_parameters": ("experts.down_proj",),
        "gradient_checkpointing": False,
    },
    "SFT with QLoRA and experts": {**SFT, **MOE, **QLORA, "target_modules": ("q_proj", "v_proj")},
    "DPO with experts": {**DPO, **MOE, **HALF, **EVEN},
    "Trainer with Liger": {**PLAIN, **LIGER},
    "Trainer with Liger in fp32": {**PLAIN, **LIGER, "bf16": False},
    "Trainer with Liger in fp16": {**PLAIN, **LIGER, **FP16},
    "Trainer with Liger in bfloat16": {**PLAIN, **LIGER, **HALF},
    "Trainer with Liger and checkpointing": {
        **PLAIN,
        **LIGER,
        **HALF,
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
    },
    "Trainer with Liger and adapters": {**PLAIN, **LIGER, **HALF, "lora": True},
    "Trainer with Liger and QLoRA": {
        **PLAIN,
        **LIGER,
        **QLORA,
        "gradient_checkpointing": True,
        "prepare_for_kbit_training": False,
    },
    **{
        f"Trainer with Liger's {name}": {
            **PLAIN,
            **LIGER,
            **HALF,
            "model_type": name,
            "optim": "sgd",
        }
        for name in ("qwen3", "phi3", "gemma2")
    },
    "SFT with Liger": {**SFT, **LIGER},
    "SFT with Liger and packing": {
        **SFT,
        **LIGER,
        **HALF,
        "packing": True,
        "gradient_checkpointing": False,
    },
    "SFT with Liger and adapters": {
        **SFT,
        **LIGER,
        **HALF,
        "lora": True,
        "gradient_checkpointing": False,
    },
    "DPO with Liger": {**DPO, **LIGER, **HALF},
    "Trainer with Liger's loss of all logits": {
        **PLAIN,
        **LIGER,
        "liger_kernel_config": {"cross_entropy": True, "fused_linear_cross_entropy": False},
    },
}
OURS = ("trainer", "dtype", "lora", "lora_dropout", "target_modules", "target_parameters")
OURS += ("load_in_8bit", "load_in_4bit", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant")
OURS += ("bnb_4bit_quant_storage", "prepare_for_kbit_training", "experts_implementation")
OF_MODEL = ("vocab_size", "sliding_window", "head_dim", "use_sliding_window", "max_window_layers")
OURS += ("model_type", "routing", "balanced", "length", *OF_MODEL)
"""Settings that the trainers' own arguments do not have."""
NOT_SETTINGS = ("model_type", "routing", "balanced", "length", *OF_MODEL)
NOT_SETTINGS += ("gradient_checkpointing_kwargs",)
"""What a case says about its model, and how layers are checkpointed, which takes the same memory."""


def is_quantized(case: dict[str, Any]) -> bool:
    """Whether the weights of a case have 4 or 8 bits."""
    return any(case.get(f"load_in_{bits}bit", False) for bits in (4, 8))


def shape_of(case: dict[str, Any]) -> dict[str, Any]:
    """The config of the model of a case."""
    shape: dict[str, Any] = {"model_type": case.get("model_type", "llama"), **SHAPE}
    shape |= {name: case[name] for name in OF_MODEL if name in case}
    if shape["model_type"] == MOE["model_type"]:
        shape |= {**EXPERTS, "output_router_logits": case.get("balanced", False)}
    return shape


def made(case: dict[str, Any], dtype: Any) -> Any:
    """The model of a case, with its routers set."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {}
    if how := case.get("experts_implementation"):
        options["experts_implementation"] = how
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**shape_of(case)), dtype=dtype, **options
    )
    if routing := case.get("routing"):
        route(model, routing)
    return model


def route(model: Any, routing: str) -> None:
    """Let each router of a model send as many tokens to all experts, or all to the same."""
    import torch

    def sent(router: Any, _: Any, found: Any) -> None:
        chosen = found[2]
        if routing == "even":
            numbers = torch.arange(chosen.numel()) % router.num_experts
        else:
            numbers = torch.arange(chosen.shape[1]).repeat(len(chosen))
        chosen.data.copy_(numbers.view_as(chosen))  # topk has saved the tensor, so it stays

    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(sent)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", "word"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def rows_for(trainer: str, length: int = LENGTH) -> Any:
    """Rows that are all as long as may be."""
    from datasets import Dataset

    half, whole = " ".join(["word"] * (length // 2)), " ".join(["word"] * length)
    tokens = [3] * length
    row: dict[str, Any] = {
        "Trainer": {"input_ids": tokens, "attention_mask": [1] * length, "labels": tokens},
        "SFTTrainer": {"text": whole},
        "DPOTrainer": {"prompt": half, "chosen": f" {whole}", "rejected": f" {whole}"},
    }[trainer]
    return Dataset.from_list([row] * 64)


def attend_without_mask(model: Any) -> None:
    """Attend as FlashAttention does where samples are packed, as far as memory goes: it has no mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("without_mask", AttentionInterface()["sdpa"])
    AttentionMaskInterface.register("without_mask", lambda **_: None)
    model.set_attn_implementation("without_mask")


def launch_nothing() -> None:
    """Let Triton's kernels, which need a GPU, compute nothing: what they compute with is allocated before."""
    from triton.runtime.jit import JITFunction

    JITFunction.run = lambda *_, **__: None


def trainer_and_arguments(name: str) -> tuple[Any, Any]:
    """A trainer's class, and that of its arguments."""
    if name == "Trainer":
        import transformers

        return transformers.Trainer, transformers.TrainingArguments
    import trl

    kinds = {
        "SFTTrainer": (trl.SFTTrainer, trl.SFTConfig),
        "DPOTrainer": (trl.DPOTrainer, trl.DPOConfig),
    }
    return kinds[name]


def measured(case: dict[str, Any]) -> int:
    """The peak of the third step of the real trainer."""
    import torch
    import transformers

    from torchtune_adaptive.core.device.simulated import SimulatedMemory

    name, memory = case["trainer"], SimulatedMemory(1 << 40)
    length = case.get("length", LENGTH)
    dtype = getattr(torch, case.get("dtype", "float32"))
    model: Any = made(case, dtype)
    if case.get("use_liger_kernel"):
        launch_nothing()
    if case.get("packing") or case.get("padding_free"):
        attend_without_mask(model)
    if is_quantized(case):
        from real_quantized import quantized

        model = quantized(model, dtype, case)
    arguments = {key: value for key, value in case.items() if key not in OURS}
    in_fp16 = arguments.pop("fp16", False)
    arguments |= {"bf16": case.get("bf16", True), "max_steps": 3, "use_cpu": True}
    arguments |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    arguments.pop("ranks", 1)  # the launcher starts them
    if case.get("fsdp"):
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        arguments["fsdp_config"] = {"fsdp_version": 2, "reshard_after_forward": True, **layers}
    more: dict[str, Any] = {}
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

        targets = case.get("target_modules", "all-linear")
        targets = targets if isinstance(targets, str) else list(targets)
        adapters = LoraConfig(
            lora_dropout=case.get("lora_dropout", 0.0),
            target_modules=targets,
            target_parameters=case.get("target_parameters"),
        )
        if name == "Trainer":
            if is_quantized(case) and case.get("prepare_for_kbit_training", True):
                model = prepare_model_for_kbit_training(model)
            elif case["gradient_checkpointing"]:
                model.enable_input_require_grads()
            model = get_peft_model(model, adapters)
        else:
            more["peft_config"] = adapters
    elif name == "DPOTrainer":
        more["ref_model"] = made(case, dtype)
    if name != "Trainer":
        arguments["max_length"] = None if case.get("padding_free") else length
        more["processing_class"] = tokenizer()

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            for each in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
                memory.adopt([*each.parameters(), *each.buffers()])
            memory.adopt(beside)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gc.collect()
            memory.watch()

    kind, config = trainer_and_arguments(name)
    trainer = kind(
        model=model,
        args=config("out", **arguments),
        # Nothing cuts off the end of a row that is not padded.
        train_dataset=rows_for(name, length - bool(case.get("padding_free"))),
        callbacks=[Watch()],
        **more,
    )
    if in_fp16:  # accelerate makes a scaler for devices only
        accelerator = trainer.accelerator
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    beside: list[Any] = []
    if is_quantized(case):
        from real_quantized import beside_weights

        beside = beside_weights(trainer.model)  # FSDP2 has weights of its own
    with memory.running():
        trainer.train()
    return memory.usage().peak_bytes


def planned(case: dict[str, Any]) -> int:
    folder = Path("model")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape_of(case)))
    settings = {key: value for key, value in case.items() if key not in NOT_SETTINGS}
    length = case.get("length", LENGTH)
    step = TransformersStep(folder=str(folder), max_length=length, **settings)
    rows = step.per_device_train_batch_size
    plan = step.plan(gpu="cpu", memory="1TiB", ceiling=rows, cache=False)
    if routing := case.get("routing"):
        return getattr(plan.experts, routing).peak
    return plan.peak


def main(names: Sequence[str]) -> None:
    results = {}
    for name in names or CASES:
        case = CASES[name]
        if ranks := case.get("ranks"):
            from fsdp2_on_cpu import first_of

            found = first_of(ranks, __file__, name)
        else:
            found = measured(case)
        results[name] = planned(case), found
    print(json.dumps(results))


if __name__ == "__main__":
    if "RANK" in os.environ:
        from fsdp2_on_cpu import tell

        tell(lambda: measured(CASES[sys.argv[1]]))
    else:
        main(sys.argv[1:])
