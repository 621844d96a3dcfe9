"""The keys of TRL's command line, for ``trl sft --config`` and ``trl dpo --config``.

``trl_rollouts`` has those of ``trl grpo`` and ``trl rloo``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchtune_adaptive.cli.other_trainers import training_arguments
from torchtune_adaptive.cli.other_trainers.keys import (
    FileReading,
    Joint,
    Keys,
    Refused,
    Sets,
    Trainer,
    names,
    target_modules,
)
from torchtune_adaptive.cli.other_trainers.sharding import read_sharding
from torchtune_adaptive.cli.other_trainers.training_arguments import (
    FLASH,
    SDPA,
    WHY_NOT_ATTENTION,
    read_checkpointing_options,
)

_TRAINED = "trains other weights, which is not planned"
_GENERATES = "is of a trainer that generates the rows that it trains on, which is not planned"
_OF_PEFT = ["q_proj", "v_proj"]
"""The layers that PEFT chooses for most models, if the file names none."""

COMMON: Keys = {
    **training_arguments.KEYS,
    "dtype": Sets(
        "dtype",
        "float32",
        {name: name for name in ("float32", "bfloat16", "float16")},
        "is a type of weights that is not planned",
        "is the type that the checkpoint has",
    ),
    "bf16": Sets("bf16", None, {None: None, True: True, False: False}),
    "fp16": Sets("fp16", False),
    "gradient_checkpointing": Joint("gradient_checkpointing", None, (None, True, False)),
    "activation_checkpointing": Joint("the same, by its new name", None, (None, True, False)),
    "activation_checkpointing_kwargs": Joint("only how layers are checkpointed"),
    "attn_implementation": Joint(
        *("padded: with sdpa, rows have a mask", None, (None, SDPA, *FLASH), WHY_NOT_ATTENTION)
    ),
    "use_peft": Sets("lora", False),
    "lora_r": Sets("r", 16),
    "lora_dropout": Sets("lora_dropout", 0.05),
    "lora_target_modules": Joint(
        "target_modules; by default q_proj and v_proj, as PEFT has for most models"
    ),
    "lora_target_parameters": Joint("target_parameters"),
    "router_aux_loss_coef": Sets("router_aux_loss_coef", None),
    "lora_modules_to_save": Refused(_TRAINED, off=(None, [])),
    "use_dora": Refused("gives adapters magnitudes, which are not planned"),
    "load_in_4bit": Sets("load_in_4bit", False),
    "use_bnb_nested_quant": Sets("bnb_4bit_use_double_quant", False),
    "bnb_4bit_quant_storage": Sets(
        "bnb_4bit_quant_storage",
        "uint8",
        {name: name for name in ("uint8", "bfloat16", "float16", "float32")},
        "is a type for weights of 4 bits that is not planned",
    ),
    "load_in_8bit": Sets("load_in_8bit", False),
    "model_init_kwargs": Refused("may make another model", off=(None, {})),
}
"""The keys of each of TRL's trainers."""
GENERATED = (
    *("use_vllm", "num_generations", "max_completion_length", "reward_funcs"),
    *("reward_model_name_or_path", "vllm_mode", "num_iterations", "generation_batch_size"),
)
"""Keys of which the files of trainers that generate rows have at least one."""
_BOTH: Keys = {
    **COMMON,
    "max_length": Sets("max_length", 1024, null="leaves rows as long as they are"),
    "activation_offloading": Refused("moves activations to the host, which is not planned"),
    **dict.fromkeys(
        GENERATED, Refused(_GENERATES, "Leave it out of a file for trl sft or trl dpo")
    ),
}
_SFT: Keys = {
    **_BOTH,
    "loss_type": Joint(
        *("trainer: the loss in tiles", None, (None, "nll", "chunked_nll")),
        "is a loss over all logits, which is not planned",
    ),
    "packing": Joint(
        "packing; with packing_strategy wrapped, padded: rows are full, without a mask",
        *(False, (True, False)),
    ),
    "packing_strategy": Joint("which rows are packed", "bfd", ("bfd", "bfd_split", "wrapped")),
    "padding_free": Joint(
        "padding_free: one row of all, here of full length", False, (True, False)
    ),
}
_DPO: Keys = {
    **_BOTH,
    "precompute_ref_log_probs": Sets("precompute_ref_log_probs", False),
    "loss_type": Joint("trainer: of the log-probabilities"),
    "padding_free": Joint("nothing: TRL 1.16 has switched it off for DPO", False, (True, False)),
    "sync_ref_model": Refused("trains a reference along, which is not planned"),
    "use_weighting": Refused("needs more of each token, which is not planned"),
}
_DPO_LOSSES = ("sigmoid", "hinge", "ipo", "robust")
IGNORED = training_arguments.IGNORED | names(
    """
    model_revision lora_alpha lora_task_type use_rslora bnb_4bit_quant_type
    bnb_4bit_compute_dtype trust_remote_code
    dataset_num_proc truncation_mode pad_to_multiple_of pad_token eos_token datasets
    streaming test_split_size dataset_name dataset_config dataset_train_split dataset_test_split
    dataset_streaming ignore_bias_buffers env accelerate_config dataset_mixture
    """
)
_SFT_IGNORED = names(
    """
    chat_template_path dataset_text_field dataset_kwargs shuffle_dataset eval_packing completion_only_loss
    assistant_only_loss
    """
)
_DPO_IGNORED = names(
    """
    disable_dropout precompute_ref_batch_size loss_weights ld_alpha f_divergence_type
    f_alpha_divergence_coef label_smoothing beta discopop_tau ref_model_mixup_alpha ref_model_sync_steps
    """
)


def _together(trainer: str, values: Mapping[str, Any], reading: FileReading) -> None:
    packed = _read_packing(trainer, values, reading)
    read_common(trainer, values, reading)
    reading.settings |= packed
    if trainer == "DPOTrainer":
        losses = values["loss_type"] or ["sigmoid"]
        losses = losses if isinstance(losses, list) else [losses]
        if other := [one for one in losses if one not in _DPO_LOSSES]:
            reason = "needs more than the log-probabilities of a row, which is not planned"
            reading.refuse(
                "loss_type", other[0], reason, f"What can be planned: {', '.join(_DPO_LOSSES)}"
            )


def _read_packing(trainer: str, values: Mapping[str, Any], reading: FileReading) -> dict[str, bool]:
    """The settings of rows, which may be packed."""
    flash = values["attn_implementation"] in FLASH
    packing = values.get("packing") is True
    joined = packing and values["packing_strategy"] != "wrapped"
    if trainer == "DPOTrainer":
        padding_free = False
        if values["padding_free"] is True:
            reading.notes.append(
                "padding_free: TRL 1.16 has switched it off for DPO, so rows are padded"
            )
    else:
        padding_free = values["padding_free"] is True
    if padding_free and not packing:
        reading.notes.append(
            "padding_free: without packing, TRL 1.16 wants max_length: null, and rows are as long as they "
            "are; they are planned with as many tokens as max_length or --seq-len says"
        )
    if (joined or padding_free) and not flash:
        key = "packing" if packing else "padding_free"
        reason = "without flash attention has one mask over all rows, which is not planned"
        reading.refuse(key, True, reason, "Add attn_implementation=flash_attention_2")
    return {"padded": not (flash or packing), "packing": joined, "padding_free": padding_free}


def read_common(trainer: str, values: Mapping[str, Any], reading: FileReading) -> None:
    """Read what the files of all of TRL's trainers have."""
    chosen = [values["activation_checkpointing"], values["gradient_checkpointing"]]
    reading.settings |= {
        "trainer": trainer,
        "padded": values["attn_implementation"] not in FLASH,
        "attn_implementation": FLASH[0] if values["attn_implementation"] in FLASH else SDPA,
        "gradient_checkpointing": next((one for one in chosen if one is not None), True),
    }
    for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        read_checkpointing_options(key, values[key], reading)
    if reading.settings.get("lora"):
        if values["lora_target_modules"]:
            found = target_modules("lora_target_modules", values["lora_target_modules"], reading)
        else:
            found = _OF_PEFT
            reading.notes.append(
                "adapters: on q_proj and v_proj, as PEFT chooses for most models (lora_target_modules)"
            )
        reading.settings["target_modules"] = found
        reading.settings["target_parameters"] = values["lora_target_parameters"] or ()
    if read_sharding(values["fsdp"], values["fsdp_config"], 2, reading):
        reading.settings["fsdp"] = True


CHECKED = "TRL 1.16 and transformers 5.23"
SFT = Trainer(
    "TRL (trl sft)", CHECKED, _SFT, IGNORED | _SFT_IGNORED, partial(_together, "SFTTrainer")
)
DPO = Trainer(
    "TRL (trl dpo)", CHECKED, _DPO, IGNORED | _DPO_IGNORED, partial(_together, "DPOTrainer")
)
