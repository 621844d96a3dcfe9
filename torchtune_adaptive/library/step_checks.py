"""Which settings of a trainer's step can be planned together, without torch. A ``step`` is a
``TransformersStep``, whose module is above this one."""

from __future__ import annotations

from typing import Any

from torchtune_adaptive.common import UsageError, arguments
from torchtune_adaptive.library.liger_choices import check_kernels
from torchtune_adaptive.library.step_choices import (
    DPO,
    FLASH,
    IMPLEMENTATIONS,
    OPTIMIZERS,
    PLAIN,
    SDPA,
    SFT,
    UNSHARDED,
)

_TYPES = ("float32", "bfloat16", "float16")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": _TYPES,
    "bf16": (None, True, False),
    "bnb_4bit_compute_dtype": (None, *_TYPES),
    "bnb_4bit_quant_storage": ("uint8", *_TYPES),
    "prepare_for_kbit_training": (None, True, False),
    "optim": OPTIMIZERS,
    "attn_implementation": (SDPA, FLASH),
    "experts_implementation": (None, *IMPLEMENTATIONS),
    "output_router_logits": (None, True, False),
    **dict.fromkeys(
        (
            *("padded", "packing", "padding_free", "fp16", "gradient_checkpointing", "lora"),
            *(
                "load_in_8bit",
                "load_in_4bit",
                "bnb_4bit_use_double_quant",
                "precompute_ref_log_probs",
            ),
            *("use_liger_kernel", "fsdp"),
        ),
        (True, False),
    ),
}
_NUMBERS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "r",
    "ranks",
)


def check_attention(step: Any, gpu: str, before_ampere: bool) -> None:
    """Raise if a step needs kernels that a GPU does not have.

    Raises:
        UsageError: it does.
    """
    if before_ampere and (asked := _flash_is_asked_by(step)):
        key, use, remedy = asked
        raise UsageError(
            f"{key}: FlashAttention{use} needs Ampere or newer, and {gpu} is older. Set {key}={remedy}."
        )


def _flash_is_asked_by(step: Any) -> tuple[str, str, str] | None:
    """The setting that needs FlashAttention, what for, and its value without; None if there is none."""
    for key in ("packing", "padding_free"):
        if getattr(step, key):
            return key, ", which keeps samples of one row apart,", "False"
    return ("attn_implementation", "", SDPA) if step.attn_implementation == FLASH else None


def check_step(step: Any) -> None:
    """Raise if a step cannot be planned as it is set.

    Raises:
        UsageError: a setting cannot be used.
    """
    arguments.one_of("trainer", step.trainer, tuple(step.STEPS))
    for name, choices in _CHOICES.items():
        arguments.one_of(name, getattr(step, name), choices)
    for name in _NUMBERS:
        arguments.whole(name, getattr(step, name))
    arguments.share("lora_dropout", step.lora_dropout)
    if step.fsdp and step.has_pairs and not (step.lora or step.precompute_ref_log_probs):
        raise UsageError(
            "fsdp: two sharded models, as DPO with a reference in memory has, cannot be traced. Set "
            "precompute_ref_log_probs=True, or fsdp=False for ranks that have all weights (more memory)."
        )
    if step.padding_free and step.trainer == DPO:
        raise UsageError(
            "padding_free: DPOTrainer of TRL 1.16 does not do it, and pads rows instead. Leave it out."
        )
    key, they = (
        ("packing", "what is packed") if step.packing else ("padding_free", "one row of all")
    )
    if step.in_one_row and (step.trainer != SFT or step.padded):
        reason = "has no padding" if step.padded else f"is SFTTrainer's, not {step.trainer}'s"
        raise UsageError(f"{key}: {they} {reason}. Set padded=False and trainer={SFT!r}.")
    if (asked := _flash_is_asked_by(step)) and step.half is None and step.dtype == "float32":
        raise UsageError(
            f"{asked[0]}: FlashAttention{asked[1]} has no kernels for float32. Set bf16=True or "
            "dtype=bfloat16."
        )
    if step.router_aux_loss_coef is not None:
        arguments.weight("router_aux_loss_coef", step.router_aux_loss_coef)
        if step.trainer == PLAIN:
            raise UsageError(
                "router_aux_loss_coef: Trainer has no such argument. Set output_router_logits=True, "
                "which turns the loss on."
            )
    if step.output_router_logits is not None and step.trainer != PLAIN:
        raise UsageError(
            f"output_router_logits: {step.trainer} decides by router_aux_loss_coef. Set that."
        )
    check_kernels(step.liger_kernel_config, step.trainer != PLAIN)
    if step.fp16 and step.bf16:
        raise UsageError("fp16: the model computes in one type. Leave bf16 out.")
    if step.fp16 and step.dtype == "float16" and not step.lora:
        raise UsageError(
            "dtype: gradients of weights in float16 cannot be scaled. Use dtype=float32, or lora=True, "
            "which trains adapters in float32."
        )
    if step.load_in_8bit and step.load_in_4bit:
        raise UsageError("load_in_8bit: weights have 8 bits or 4. Leave one of the two out.")
    for bits in (4, 8):
        if getattr(step, f"load_in_{bits}bit") and not step.lora:
            raise UsageError(
                f"load_in_{bits}bit: weights of {bits} bits cannot be trained. Set lora=True."
            )
    if step.load_in_8bit and step.fsdp:
        raise UsageError(
            "fsdp: FSDP2 cannot shard weights of 8 bits, which are integers. Use load_in_4bit=True, or "
            "fsdp=False for ranks that have all weights (more memory)."
        )
    casts = step.load_in_4bit and step.shares_4_bits and step.half
    if casts and step.bnb_4bit_quant_storage != step.half:
        raise UsageError(
            f"bnb_4bit_quant_storage: FSDP2 casts what it gathers to {step.half}, in which the model "
            f"computes, and 4 bits that are stored as {step.bnb_4bit_quant_storage} do not survive that. "
            f"Set bnb_4bit_quant_storage={step.half}."
        )
    if step.fsdp and step.optim in UNSHARDED:
        raise UsageError(
            f"fsdp: {step.optim} cannot update parameters that FSDP2 has sharded. Use "
            "optim=adamw_torch_fused, or fsdp=False for ranks that have all weights (more memory)."
        )
