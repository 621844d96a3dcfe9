"""Axolotl's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune_adaptive.cli.other_trainers.keys import (
    IMPLEMENTATIONS,
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
    COMPILED,
    DEEPSPEED,
    FLASH,
    FORMAT,
    FP16,
    IN_ONE_GPU,
    KERNELS,
    MODEL,
    OPTIMIZERS,
    PARALLEL,
    SDPA,
    WHY_NOT_ATTENTION,
    WHY_NOT_OPTIMIZER,
    read_checkpointing_options,
)

_MODEL = "makes another model than the one of base_model"
_TRAINED = "trains other weights, which is not planned"
_LOSS = "computes the loss by other kernels, which is not planned"
_EXPERTS = "computes experts by other kernels, which are not planned"
_BY_KERNELS = "integrations.kernels"
"""The plugin with which experts are computed one after the other where nothing else is set."""
_ONE = (None, False, 1)
_HARMLESS_PLUGINS = (
    *("swanlab", "lm_eval", "torchtune_adaptive"),
    *("liger", _BY_KERNELS, "expert_parallel"),  # which do what other keys say
)
_LIGER = {
    "liger_rope": ("rope",),
    "liger_rms_norm": ("rms_norm",),
    "liger_glu_activation": ("swiglu", "geglu"),
    "liger_swiglu": ("swiglu", "geglu"),
    "liger_fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
    "liger_cross_entropy": ("cross_entropy",),
}
"""Keys of the plugin for Liger, and the kernels that they switch on."""
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")

_KEYS: Keys = {
    "base_model": Joint(MODEL),
    "micro_batch_size": Sets("per_device_train_batch_size", 1),
    "gradient_accumulation_steps": Sets("gradient_accumulation_steps", 1),
    "sequence_len": Sets("max_length", 512),
    "adapter": Sets("lora", None, {None: False, "lora": True, "qlora": True}, _TRAINED),
    "load_in_8bit": Joint("load_in_8bit, which goes with adapter: lora", False, (True, False)),
    "load_in_4bit": Joint("load_in_4bit, which goes with adapter: qlora", False, (True, False)),
    "bnb_config_kwargs": Joint(
        "bnb_4bit_use_double_quant and bnb_4bit_quant_storage, by default true and bfloat16", {}
    ),
    "lora_r": Sets("r", 8),
    "lora_dropout": Sets("lora_dropout", 0.0),
    "lora_target_linear": Joint("target_modules: linear-layers", False, (True, False)),
    "lora_target_modules": Joint("target_modules"),
    "optimizer": Sets("optim", "adamw_torch_fused", OPTIMIZERS, WHY_NOT_OPTIMIZER),
    "max_grad_norm": Sets("max_grad_norm", 1.0),
    "gradient_checkpointing": Sets(
        *("gradient_checkpointing", False, {True: True, False: False}),
        "is neither true nor false, and activations on the host are not planned",
    ),
    "gradient_checkpointing_kwargs": Joint("only how layers are checkpointed"),
    "bf16": Joint(
        "dtype and bf16: bfloat16 weights, mixed precision", "auto", ("auto", True, False, "full")
    ),
    "bfloat16": Joint("the same", False, (True, False)),
    "attn_implementation": Joint(
        "padded: with sdpa, rows have a mask", None, (None, SDPA, *FLASH), WHY_NOT_ATTENTION
    ),
    "flash_attention": Joint("as attn_implementation: flash_attention_2", False, (True, False)),
    "sdp_attention": Joint("as attn_implementation: sdpa", False, (True, False)),
    "sample_packing": Joint("padded: rows are full, without a mask", False, (True, False)),
    "batch_flattening": Joint(
        "padded: rows are one, here of full length, without a mask",
        None,
        (None, True, False, "auto"),
    ),
    "fsdp": Joint("fsdp, with several GPUs"),
    "fsdp_config": Joint("fsdp: see the table of its keys"),
    "fsdp_version": Joint("fsdp: 2 is planned; 1, which is FSDP1, is the default"),
    "experts_implementation": Joint(
        "experts_implementation; with the plugin for kernels, eager by default",
        *(None, (None, *IMPLEMENTATIONS), _EXPERTS),
    ),
    "model_type": Joint("must be a causal language model"),
    "plugins": Joint("those that change the model or the loss are refused"),
    **{
        name: Joint(
            "planned without: these kernels keep fewer activations", None, (None, True, False)
        )
        for name in _LORA_KERNELS
    },
    **{
        name: Joint(
            f"liger_kernel_config: {', '.join(kernels)}; with the plugin for Liger",
            *(None, (None, True, False)),
        )
        for name, kernels in _LIGER.items()
    },
    "embeddings_skip_upcast": Refused("leaves embeddings in float32, which is not planned"),
    "gptq": Refused(FORMAT),
    "model_quantization_config": Refused(FORMAT),
    "qat": Refused("trains quantized weights, which is not planned"),
    "fp16": Refused(FP16, "On a GPU that has bfloat16, plan bf16=true fp16=false"),
    "float16": Refused(FP16, "On a GPU that has bfloat16, plan bf16=true float16=false"),
    "fp8": Refused("is mixed precision in 8 bits, which is not planned"),
    "deepspeed": Refused(
        DEEPSPEED, "To plan FSDP2 in its place, add deepspeed=null fsdp=full_shard fsdp_version=2"
    ),
    "rl": Refused(
        "trains on preferences or rewards by Axolotl's version of TRL, whose heads differ",
        "Plan TRL's DPOTrainer: --hf DIR --trainer DPOTrainer",
    ),
    "reward_model": Refused("trains another head, which is not planned"),
    "process_reward_model": Refused("trains another head, which is not planned"),
    "num_labels": Refused("trains another head, which is not planned"),
    "processor_type": Refused(
        "is for images or sound, and text is planned", "To plan text, add processor_type=null"
    ),
    "peft_use_dora": Refused("gives adapters magnitudes, which are not planned"),
    "peft": Refused("quantizes weights for adapters, which is not planned", off=(None, {})),
    "peft_autocast_adapter_dtype": Refused(
        "has adapters in bfloat16, and they are planned in float32", off=(None, True)
    ),
    "peft_layers_to_transform": Refused(_TRAINED, off=(None, [])),
    "peft_layers_pattern": Refused(_TRAINED, off=(None, [])),
    "peft_layer_replication": Refused(_MODEL, off=(None, [])),
    "peft_trainable_token_indices": Refused(_TRAINED, off=(None, [])),
    "lora_modules_to_save": Refused(_TRAINED, off=(None, [])),
    "lora_target_parameters": Refused(_TRAINED, off=(None, [])),
    "lora_rank_pattern": Refused(
        "has adapters of several ranks, which are not planned", off=(None, {})
    ),
    "unfrozen_parameters": Refused(_TRAINED, off=(None, [])),
    "relora": Refused(_TRAINED),
    "lisa_n_layers": Refused(_TRAINED),
    "fix_untrained_tokens": Refused(_TRAINED, off=(None, [])),
    "optim_target_modules": Refused("projects gradients, which is not planned", off=(None, [])),
    "embedding_lr": Refused("has an optimizer of its own groups, which is not planned"),
    "overrides_of_model_config": Refused(_MODEL, off=(None, {})),
    "overrides_of_model_kwargs": Refused(_MODEL, off=(None, {})),
    "model_config": Refused(_MODEL, off=(None, {})),
    "base_model_config": Refused(
        _MODEL, "Give the folder of its config.json by --hf, and add base_model_config=null"
    ),
    "batch_size": Refused(
        "is the rows of a step",
        "Write gradient_accumulation_steps in its place, and add batch_size=null",
    ),
    "activation_offloading": Refused("moves activations to the host, which is not planned"),
    "layer_offloading": Refused("moves layers to the host, which is not planned"),
    "selective_checkpointing": Refused("keeps part of each layer, and whole layers are planned"),
    "torch_compile": Refused(COMPILED),
    "tiled_mlp": Refused("computes layers in parts, which is not planned"),
    "cut_cross_entropy": Refused(_LOSS),
    "chunked_cross_entropy": Refused(_LOSS),
    "use_eaft": Refused(_LOSS),
    "flash_attn_cross_entropy": Refused(_LOSS),
    "liger_use_token_scaling": Refused(_LOSS),
    **dict.fromkeys(
        (
            *("liger_rms_norm_gated", "liger_layer_norm", "liger_kernel_impl"),
            *("use_kernels", "flash_attn_fuse_mlp"),
            *("flash_attn_rms_norm", "flash_attn_fuse_qkv", "fused_attn_kernel", "use_onebitllms"),
        ),
        Refused(KERNELS),
    ),
    **dict.fromkeys(
        (
            *("xformers_attention", "flex_attention", "sage_attention", "eager_attention"),
            *("s2_attention", "scaling_softmax", "large_head_attention", "sdpa_varlen"),
            *("gemma4_hybrid_attn_impl", "flash_attn_d512", "flash_optimum"),
        ),
        Refused(WHY_NOT_ATTENTION),
    ),
    **dict.fromkeys(
        (
            *("quantize_moe_experts", "use_scattermoe", "use_sonicmoe"),
            *("llama4_linearized_experts", "dsv4_fp4_grouped_mode", "use_dsv4_kernels"),
        ),
        Refused(_EXPERTS),
    ),
    **dict.fromkeys(
        (
            *("sequence_parallel_degree", "context_parallel_size", "tensor_parallel_size"),
            *("expert_parallel_size", "dp_shard_size", "dp_replicate_size"),
        ),
        Refused(PARALLEL, IN_ONE_GPU, _ONE),
    ),
    "fp32_norms": Refused("has norms in float32, which is not planned"),
    "multipack_real_batches": Refused("has several rows of packs, which is not planned"),
    "use_pose": Refused("has rows of other lengths, which is not planned"),
    "max_memory": Refused("spreads the model over devices, which is not planned", off=(None, {})),
    "gpu_memory_limit": Refused("spreads the model over devices, which is not planned"),
    "trainer_cls": Refused("is another trainer"),
    "ebft": Refused("is another method of training", off=(None, {})),
    "diffusion": Refused("is another method of training", off=(None, {})),
}
_IGNORED = names(
    """
    base_model_ignore_patterns strict resume_from_checkpoint auto_resume_from_checkpoints
    resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings
    reinit_weights trl vllm quantization dynamic_checkpoint center_rewards_coefficient dpo_use_weighting
    dpo_label_smoothing precompute_ref_log_probs dpo_use_liger_kernel dpo_padding_free dpo_loss_type
    dpo_loss_weights dpo_beta rl_beta orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight
    kto_undesirable_weight rpo_alpha datasets test_datasets shuffle_merged_datasets
    shuffle_before_merging_datasets dataset_prepared_path dataset_shard_num dataset_shard_idx
    skip_prepare_dataset num_dataset_shards_to_save pretraining_dataset dataset_processes dataset_num_proc
    dataset_exact_deduplication dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers
    dataloader_prefetch_factor dataloader_drop_last accelerator_config remove_unused_columns
    push_dataset_to_hub hf_use_auth_token device device_map world_size local_rank ddp seed ddp_timeout
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters do_causal_lm_eval
    eval_causal_lm_metrics do_bench_eval bench_dataset bench_split metric_for_best_model greater_is_better
    loss_watchdog_threshold loss_watchdog_patience gc_steps torch_empty_cache_steps gc_collect_steps
    fp8_enable_fsdp_float8_all_gather tf32 float32 excess_length_strategy eval_sequence_len min_sample_len
    max_prompt_len sample_packing_group_size sample_packing_bin_size sample_packing_sequentially
    sample_packing_mp_start_method sample_packing_eff_est sample_packing_seq_len_multiplier
    eval_sample_packing pad_to_sequence_len pad_to_multiple_of curriculum_sampling pose_split_on_token_ids
    pose_max_context_len pose_num_chunks pretrain_multipack_buffer_size pretrain_multipack_attn
    pretraining_sample_concatenation streaming streaming_multipack_buffer_size max_packed_sequence_len
    flex_attn_compile_kwargs scaling_softmax_factor scaling_softmax_bias chunked_cross_entropy_num_chunks
    eaft_alpha eaft_k tiled_mlp_num_shards tiled_mlp_use_original_mlp deepcompile fp32_norm_classes
    fsdp_final_state_dict_type val_set_size heads_k_stride ring_attn_func special_tokens tokens
    added_tokens_overrides torch_compile_backend torch_compile_mode torch_compile_options max_steps
    warmup_steps warmup_ratio eval_steps evals_per_epoch eval_strategy evaluation_strategy save_steps
    saves_per_epoch save_strategy save_total_limit save_first_step logging_steps early_stopping_patience
    load_best_model_at_end save_only_model use_tensorboard profiler_steps profiler_steps_start
    include_tokens_per_second include_tkps neftune_noise_alpha noisy_embedding_alpha low_cpu_mem_usage
    chat_template chat_template_jinja chat_template_kwargs eot_tokens default_system_message is_preprocess
    preprocess_iterable total_num_tokens total_supervised_tokens axolotl_config_path
    is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model
    generate_samples num_generation_samples generation_max_new_tokens generation_temperature
    generation_top_p generation_top_k generation_prompt_ratio generation_do_sample lora_model_dir
    lora_alpha lora_fan_in_fan_out lora_alpha_pattern peft_use_rslora peft_init_lora_weights
    peft_ensure_weight_tying qlora_sharded_model_loading lora_on_cpu loraplus_lr_ratio
    loraplus_lr_embedding merge_lora merge_method gptq_groupsize gptq_model_v1 gptq_disable_exllama
    relora_prune_ratio relora_prune_method relora_cpu_offload cls_model_config tokenizer_config
    tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common tokenizer_type processor_kwargs
    tokenizer_save_jinja_files trust_remote_code experimental_skip_move_to_device
    model_quantization_config_kwargs revision_of_model type_of_model output_dir hub_model_id hub_strategy
    hub_revision save_safetensors eval_batch_size auto_find_batch_size train_on_inputs group_by_length
    learning_rate embedding_lr_scale weight_decay optim_args torchdistx_path lr_scheduler
    lr_scheduler_kwargs lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor
    lr_groups adam_epsilon adam_eps adam_epsilon2 adam_beta1 adam_beta2 adam_beta3 eta_min num_epochs
    jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps rope_scaling
    eval_table_size eval_max_new_tokens debug image_size image_resize_algorithm role_boundaries
    freeze_mm_modules lisa_step_interval lisa_layers_attribute use_ray ray_run_name ray_num_workers
    resources_per_worker use_wandb wandb_name wandb_run_id wandb_mode wandb_project wandb_entity
    wandb_watch wandb_log_model use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name
    hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name
    comet_experiment_key comet_mode comet_online comet_experiment_config use_trackio trackio_project_name
    trackio_run_name trackio_space_id use_otel_metrics otel_metrics_host otel_metrics_port gradio_title
    gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature
    use_swanlab swanlab_project swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace
    swanlab_log_model swanlab_log_completions swanlab_completion_log_interval
    swanlab_completion_max_buffer adaptive
    """
)


def _together(values: Mapping[str, Any], reading: FileReading) -> None:
    flash = values["flash_attention"] or values["attn_implementation"] in FLASH
    packed = values["sample_packing"]
    if packed and not flash:
        reason = "without flash attention has one mask over all rows, which is not planned"
        reading.refuse("sample_packing", True, reason, "Add attn_implementation=flash_attention_2")
    if values["batch_flattening"] is True and not flash:
        reason = "is for flash attention, and Axolotl refuses it without"
        reading.refuse(
            "batch_flattening", True, reason, "Add attn_implementation=flash_attention_2"
        )
    half = values["bf16"] in ("auto", True, "full") or values["bfloat16"] is True
    if values["bf16"] == "auto":
        reading.notes.append("bf16: auto is taken as true, as on GPUs that have bfloat16")
    reading.settings |= {
        "trainer": "Trainer",
        "padded": not (flash or packed),
        "attn_implementation": FLASH[0] if flash else SDPA,
        "dtype": "bfloat16" if half else "float32",
        "bf16": half and values["bf16"] != "full",
    }
    read_checkpointing_options(
        "gradient_checkpointing_kwargs", values["gradient_checkpointing_kwargs"], reading
    )
    model = values["model_type"]
    if model is not None and not str(model).endswith("ForCausalLM"):
        reading.refuse(
            "model_type", model, "is not a causal language model", "No other can be planned"
        )
    plugins = values["plugins"] or []
    plugins = plugins if isinstance(plugins, list) else [plugins]
    for plugin in plugins:
        if not any(name in str(plugin) for name in _HARMLESS_PLUGINS):
            reason = "may change the model or its loss, which is not planned"
            reading.refuse("plugins", plugin, reason, "To plan without it, add plugins=null")
    _read_liger(values, any("liger" in str(one) for one in plugins), reading)
    implementation = values.get("experts_implementation")
    if implementation is None and any(_BY_KERNELS in str(one) for one in plugins):
        implementation = "eager"
    if implementation is not None:
        reading.settings["experts_implementation"] = implementation
    _read_quantized(values, reading)
    if values.get("adapter"):
        _read_adapters(values, reading)
    version = values["fsdp_version"] or 1
    if read_sharding(values["fsdp"], values["fsdp_config"], version, reading, "fsdp_version"):
        reading.settings["fsdp"] = True
        if not values.get("adapter"):
            reason = "without an adapter is Axolotl's own FSDP2, whose weights and optimizer's state are in "
            reason += "bfloat16, and float32 is planned"
            key = "fsdp_config" if values["fsdp_config"] else "fsdp"
            reading.refuse(
                key, values[key], reason, "Plan adapter=lora, or TRL's trainer, which has float32"
            )


def _read_liger(values: Mapping[str, Any], has_plugin: bool, reading: FileReading) -> None:
    """Read which of Liger's kernels are on: all are off by default, and without the plugin."""
    on = [key for key in _LIGER if values.get(key) is True]
    if on and not has_plugin:
        reading.notes.append(
            f"{', '.join(on)}: not planned, because plugins has no LigerPlugin, which reads them"
        )
    elif on:
        chosen = {kernel for key in on for kernel in _LIGER[key]}
        switches = {kernel: kernel in chosen for kernels in _LIGER.values() for kernel in kernels}
        reading.settings |= {"use_liger_kernel": True, "liger_kernel_config": switches}


def _read_adapters(values: Mapping[str, Any], reading: FileReading) -> None:
    targets = values["lora_target_modules"]
    if values["lora_target_linear"]:
        reading.settings["target_modules"] = LINEAR_LAYERS
    elif targets:
        reading.settings["target_modules"] = target_modules("lora_target_modules", targets, reading)
    else:
        reason = "leaves the choice of layers to PEFT, which has one for each kind of model"
        reading.refuse("lora_target_modules", targets, reason, "Add lora_target_linear=true")
    kernels = [values[name] for name in _LORA_KERNELS]
    # Axolotl switches none on for weights of 8 bits, which they cannot compute with.
    if any(kernels) or (all(one is None for one in kernels) and not values["load_in_8bit"]):
        reading.notes.append(
            "LoRA kernels: planned without them, but Axolotl switches them on unless lora_mlp_kernel and the "
            "like are false; they keep fewer activations"
        )


def _read_quantized(values: Mapping[str, Any], reading: FileReading) -> None:
    four_bits, quantized = values["load_in_4bit"] is True, values.get("adapter") == "qlora"
    eight_bits = values["load_in_8bit"] is True
    if eight_bits and quantized:
        remedy = "Add load_in_8bit=false load_in_4bit=true, or adapter=lora"
        reading.refuse("load_in_8bit", True, "goes with adapter: lora only", remedy)
    elif four_bits and not quantized:
        reading.refuse("load_in_4bit", True, "goes with adapter: qlora only", "Add adapter=qlora")
    elif quantized and not four_bits:
        remedy = "Add load_in_4bit=true, or adapter=lora"
        reading.refuse("adapter", "qlora", "needs load_in_4bit: true", remedy)
    elif four_bits:
        options = values["bnb_config_kwargs"]
        given = options if isinstance(options, Mapping) else {}
        reading.settings |= {
            "load_in_4bit": True,
            "bnb_4bit_use_double_quant": given.get("bnb_4bit_use_double_quant") is not False,
            "bnb_4bit_quant_storage": given.get("bnb_4bit_quant_storage", "bfloat16"),
            "prepare_for_kbit_training": False,  # it is, and then cast back
        }
    elif eight_bits:
        reading.settings |= {"load_in_8bit": True, "prepare_for_kbit_training": False}


AXOLOTL = Trainer(
    "Axolotl",
    "the schema of July 2026, with transformers 5.14 and PEFT 0.19",
    _KEYS,
    _IGNORED,
    _together,
    model="base_model",
    rows="micro_batch_size",
    length="sequence_len",
    adapters=("adapter", "lora"),
)
