"""The keys of transformers' ``TrainingArguments``, which the files of several trainers have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune_adaptive.cli.other_trainers.keys import (
    FileReading,
    Joint,
    Keys,
    Refused,
    Sets,
    names,
)

OPTIMIZERS = {
    name: name
    for name in (
        *("adamw_torch_fused", "adamw_torch", "sgd", "adafactor"),
        *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    )
}
"""The optimizers that can be planned, by transformers' names, which are the step's."""
WHY_NOT_OPTIMIZER = "has a state or a step that is not planned"
FLASH = (
    "flash_attention_2",
    "flash_attention_3",
    "kernels-community/flash-attn2",
    "kernels-community/flash-attn3",
    "kernels-community/vllm-flash-attn3",
)
"""Attention that skips padding, and so needs no mask."""
SDPA = "sdpa"
WHY_NOT_ATTENTION = "is attention that is not planned"
FORMAT = "has weights of fewer bits in another format, which is not planned"
KERNELS = "replaces layers by kernels that keep other activations, which are not planned"
FP16 = "is mixed precision with a scaler of losses, which is not planned"
DEEPSPEED = "is a strategy of DeepSpeed, which is not planned"
COMPILED = "is a compiled step, which is not planned for transformers"
PARALLEL = "divides rows or layers over ranks, which is not planned for transformers"
IN_ONE_GPU = "Plan one GPU without it, or FSDP2"
_SAME_CHECKPOINTS = {"use_reentrant", "preserve_rng_state", "determinism_check"}

MODEL = "the model, unless --hf names one"

KEYS: Keys = {
    "model_name_or_path": Joint(MODEL),
    "per_device_train_batch_size": Sets("per_device_train_batch_size", 8),
    "gradient_accumulation_steps": Sets("gradient_accumulation_steps", 1),
    "optim": Sets("optim", "adamw_torch_fused", OPTIMIZERS, WHY_NOT_OPTIMIZER),
    "max_grad_norm": Sets("max_grad_norm", 1.0),
    "gradient_checkpointing_kwargs": Joint("only how layers are checkpointed"),
    "fsdp": Joint("fsdp, with several GPUs"),
    "fsdp_config": Joint("fsdp: see the table of its keys"),
    "fp16": Refused(FP16, "On a GPU that has bfloat16, plan bf16=true fp16=false"),
    "deepspeed": Refused(
        DEEPSPEED,
        "To plan FSDP2 in its place, add deepspeed=null fsdp=full_shard fsdp_config.version=2",
    ),
    "torch_compile": Refused(COMPILED),
    "use_liger_kernel": Sets("use_liger_kernel", False),
    "liger_kernel_config": Sets("liger_kernel_config", None),
    "optim_target_modules": Refused("projects gradients, which is not planned"),
    "parallelism_config": Refused(PARALLEL, IN_ONE_GPU),
    "label_smoothing_factor": Refused("needs log-probabilities of all logits", off=(None, 0, 0.0)),
}
"""Those that decide memory; each trainer adds its own, and its own defaults."""
IGNORED = names(
    """
    output_dir overwrite_output_dir num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps warmup_ratio optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon average_tokens_across_devices bf16_full_eval fp16_full_eval tf32 torch_compile_backend
    torch_compile_mode use_cache neftune_noise_alpha torch_empty_cache_steps
    auto_find_batch_size logging_strategy logging_steps logging_first_step logging_dir log_on_each_node
    logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy evaluation_strategy eval_steps eval_delay
    per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model
    save_strategy save_steps save_on_each_node save_total_limit save_safetensors enable_jit_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names train_sampling_strategy group_by_length length_column_name
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
    ddp_timeout debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
    """
)


def read_checkpointing_options(key: str, given: Any, reading: FileReading) -> None:
    """Refuse options of checkpointing that change what is kept."""
    options = given if isinstance(given, Mapping) else {}
    if other := sorted(set(options) - _SAME_CHECKPOINTS):
        reason = f"has {', '.join(other)}, and every layer is planned as checkpointed"
        reading.refuse(key, dict(options), reason, f"To plan that, add {key}=null")
