"""LLaMA-Factory's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune_adaptive.cli.other_trainers import training_arguments
from torchtune_adaptive.cli.other_trainers.keys import (
    LINEAR_LAYERS,
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
    FORMAT,
    KERNELS,
    PARALLEL,
    SDPA,
    WHY_NOT_ATTENTION,
    WHY_NOT_OPTIMIZER,
    read_checkpointing_options,
)

_FLASH = ("fa2", "fa3", "flash_attention_2", "flash_attention_3")
_TRAINED = "trains other weights, which is not planned"
_LOSS = "computes another loss, which is not planned"
_ELSEWHERE = "trains by another engine, which is not planned"

_KEYS: Keys = {
    **training_arguments.KEYS,
    "cutoff_len": Sets("max_length", 2048),
    "stage": Joint(
        *("trainer: Trainer's step; for pt, packing is the default", "sft", ("sft", "pt")),
        "has a loss of its own over all logits, by a TRL before version 1",
    ),
    "do_train": Joint("must be true", False, (True,), "does not train"),
    "finetuning_type": Sets("lora", "lora", {"lora": True, "full": False}, _TRAINED),
    "lora_rank": Sets("r", 8),
    "lora_dropout": Sets("lora_dropout", 0.0),
    "lora_target": Joint("target_modules: all is linear-layers", "all"),
    "moe_aux_loss_coef": Joint("output_router_logits: true, unless it is 0"),
    "bf16": Joint("bf16, and dtype: float32 where weights are trained", False, (True, False)),
    "pure_bf16": Joint("dtype: bfloat16", False, (True, False)),
    "disable_gradient_checkpointing": Joint("gradient_checkpointing: false", False, (True, False)),
    "gradient_checkpointing": Joint("gradient_checkpointing", False, (True, False)),
    "flash_attn": Joint(
        "padded: without fa2 or fa3, rows have a mask",
        "auto",
        ("auto", "sdpa", *_FLASH),
        WHY_NOT_ATTENTION,
    ),
    "packing": Joint("padded: rows are full, without a mask", None, (None, True, False)),
    "neat_packing": Joint("the same, with fa2 or fa3", False, (True, False)),
    "quantization_bit": Joint("load_in_4bit or load_in_8bit", None, (None, 4, 8)),
    "quantization_method": Joint("must be bitsandbytes'", "bnb", ("bnb",), FORMAT),
    "double_quantization": Sets("bnb_4bit_use_double_quant", True),
    "use_dora": Refused("gives adapters magnitudes, which are not planned"),
    "additional_target": Refused(_TRAINED),
    "resize_vocab": Refused("makes other embeddings, which may be trained as well"),
    "freeze_language_model": Refused(_TRAINED),
    "use_llama_pro": Refused(_TRAINED),
    "mixture_of_depths": Refused("makes another model"),
    "shift_attn": Refused(WHY_NOT_ATTENTION),
    "upcast_layernorm": Refused("has norms in float32, which is not planned"),
    "upcast_lmhead_output": Refused("has logits in float32 twice, which is not planned"),
    "enable_liger_kernel": Joint("use_liger_kernel", False, (True, False)),
    "use_v1_kernels": Refused(KERNELS),
    "use_unsloth": Refused("replaces the model, which is not planned"),
    "use_unsloth_gc": Refused("moves activations to the host, which is not planned"),
    "fp8": Refused("is mixed precision in 8 bits, which is not planned"),
    **dict.fromkeys(("use_dft_loss", "use_asft_loss", "use_eaft_loss"), Refused(_LOSS)),
    **dict.fromkeys(
        ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon"),
        Refused(WHY_NOT_OPTIMIZER),
    ),
    **dict.fromkeys(
        ("use_kt", "use_mca", "use_megatron_bridge", "use_hyper_parallel"), Refused(_ELSEWHERE)
    ),
    **dict.fromkeys(
        (
            *(
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "expert_model_parallel_size",
            ),
            *("context_parallel_size", "sequence_parallel", "use_distributed_optimizer"),
            *("recompute_granularity", "moe_grouped_gemm", "use_packed_sequences"),
            *("overlap_param_gather", "overlap_grad_reduce", "bias_activation_fusion"),
            *("apply_rope_fusion", "moe_token_dispatcher_type", "mixed_precision"),
        ),
        Refused("is of Megatron, which is not planned", off=(None, False, 1)),
    ),
    "hyper_parallel_cp_size": Refused(PARALLEL, off=(None, 1)),
}
_OF_MODEL = names(
    """
    adapter_name_or_path adapter_folder cache_dir use_fast_tokenizer
    split_special_tokens add_tokens add_special_tokens new_special_tokens_config init_special_tokens
    model_revision low_cpu_mem_usage rope_scaling use_reentrant_gc train_from_scratch
    infer_backend offload_folder use_kv_cache infer_dtype hf_hub_token ms_hub_token om_hub_token
    print_param_status trust_remote_code quantization_type
    quantization_device_map image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches
    video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate
    export_dir export_size export_device export_quantization_bit export_quantization_dataset
    export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id
    vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen
    sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend kt_cpu_activation kt_weight_path
    kt_non_expert_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num
    kt_lora_expert_intermediate_size kt_config
    """
)
_OF_DATA = names(
    """
    template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history streaming buffer_size
    mix_strategy interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers
    max_samples eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset tool_format
    default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system do_sample
    temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
    skip_special_tokens predict_with_generate generation_max_length generation_num_beams
    """
)
_OF_METHOD = names(
    """
    lora_alpha loraplus_lr_ratio loraplus_lr_embedding use_rslora pissa_init pissa_iter pissa_convert
    create_new_adapter freeze_trainable_layers freeze_trainable_modules freeze_extra_modules
    module_dropout oft_rank oft_block_size oft_target pref_beta pref_ftx pref_bco_weight pref_loss
    dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs
    ppo_score_norm ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit
    reward_model reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha
    galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise
    apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
    apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode
    badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose asft_alpha eaft_alpha
    freeze_vision_tower freeze_multi_modal_projector compute_accuracy disable_shuffling
    early_stopping_steps plot_loss include_effective_tokens_per_second use_swanlab swanlab_project
    swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir
    swanlab_lark_webhook_url swanlab_lark_secret ray_num_workers ray_init_kwargs ray_run_name
    ray_storage_path resources_per_worker placement_strategy master_addr master_port enable_torch_profiler
    profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat
    profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules fp8_backend
    fp8_enable_fsdp_float8_all_gather hyper_parallel_args export_hf_on_finish
    """
)


def _together(values: Mapping[str, Any], reading: FileReading) -> None:
    flash = values["flash_attn"] in _FLASH
    packing = values["packing"]
    packed = (values["stage"] == "pt" if packing is None else packing) or values["neat_packing"]
    if values["neat_packing"] and not flash:
        reason = "without flash attention has a mask for each row, which is not planned"
        reading.refuse("neat_packing", True, reason, "Add flash_attn=fa2")
    half = values["bf16"] is True
    lora = values.get("finetuning_type") == "lora"
    if not (half or values["pure_bf16"]):
        reason = "leaves the type of the weights to the model's config"
        reading.refuse("bf16", values["bf16"], reason, "Add bf16=true or pure_bf16=true")
    reading.settings |= {
        "trainer": "Trainer",
        "padded": not (flash or packed),
        "attn_implementation": FLASH[0] if flash else SDPA,
        # What is trained is cast to float32, but for pure_bf16; the rest is as it computes.
        "dtype": "bfloat16" if lora or values["pure_bf16"] else "float32",
        "bf16": half,
        "gradient_checkpointing": not values["disable_gradient_checkpointing"]
        or values["gradient_checkpointing"] is True,
    }
    if lora and values["pure_bf16"]:
        reading.notes.append("adapters: in float32, though pure_bf16 may leave them in bfloat16")
    read_checkpointing_options(
        "gradient_checkpointing_kwargs", values["gradient_checkpointing_kwargs"], reading
    )
    if lora:
        found = target_modules("lora_target", values["lora_target"], reading)
        found = LINEAR_LAYERS if found == "all-linear" else found
        reading.settings["target_modules"] = found
    if values["enable_liger_kernel"] is True:
        reading.settings["use_liger_kernel"] = True
    if values["moe_aux_loss_coef"]:
        reading.settings["output_router_logits"] = True
    if bits := values["quantization_bit"]:
        reading.settings |= {f"load_in_{bits}bit": True, "prepare_for_kbit_training": False}
    if bits == 4:
        reading.settings["bnb_4bit_quant_storage"] = "bfloat16"  # the type that it computes in
    if read_sharding(values["fsdp"], values["fsdp_config"], 1, reading):
        reading.settings["fsdp"] = True


LLAMA_FACTORY = Trainer(
    "LLaMA-Factory",
    "its arguments of August 2026, with transformers 5.6, whose FSDP is version 1 unless fsdp_config says 2",
    _KEYS,
    (training_arguments.IGNORED | _OF_MODEL | _OF_DATA | _OF_METHOD) - set(_KEYS),
    _together,
    length="cutoff_len",
    checkpointing=("disable_gradient_checkpointing", False),
    adapters=("finetuning_type", "lora"),
)
