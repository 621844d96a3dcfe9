"""Each field of training arguments is used by the trainer itself, or refused, or without effect by name."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import pytest

from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    Loss,
    lose_memory,
    make,
    on_ranks,
    tokens,
)
from torchtune_adaptive.integrations.refusals import REFUSED

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]


def fields_read(kind: str, ours: bool) -> set[str]:
    """The fields that are read while a trainer trains and saves."""
    import transformers
    import trl

    arguments = {
        "trainer": transformers.TrainingArguments,
        "sft": trl.SFTConfig,
        "dpo": trl.DPOConfig,
        "grpo": trl.GRPOConfig,
        "rloo": trl.RLOOConfig,
    }
    names = {field.name for field in dataclasses.fields(arguments[kind])}
    read: set[str] = set()

    def watching(self: Any, name: str) -> Any:
        if name in names:
            read.add(name)
        return object.__getattribute__(self, name)

    with tempfile.TemporaryDirectory() as folder:
        trainer = make(
            kind, AS_CONFIGURED if ours else None, folder, save_strategy="steps", save_steps=2
        )
        arguments[kind].__getattribute__ = watching  # type: ignore[method-assign]
        try:
            trainer.train()
        finally:
            del arguments[kind].__getattribute__
    return read


def both(kind: str) -> list[set[str]]:
    return [fields_read(kind, ours) for ours in (False, True)]


@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo", "grpo", "rloo"])
def test_what_the_plain_trainer_reads_in_training_ours_reads_too(kind: str) -> None:
    [(plain, ours)] = on_ranks(both, 1, kind)
    assert len(plain) > 30
    assert plain <= ours, plain - ours


USED = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm
    label_smoothing_factor bf16 bf16_full_eval fp16 fp16_full_eval tf32 activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
    neftune_noise_alpha torch_empty_cache_steps logging_strategy logging_steps logging_first_step
    log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
    disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
    dataloader_drop_last dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_pin_memory
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    train_sampling_strategy length_column_name ddp_backend ddp_timeout fsdp fsdp_config debug
    ddp_find_unused_parameters ddp_bucket_cap_mb
    skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
"""
"""What the trainer itself uses, in code that runs as it is."""


def test_each_field_of_the_installed_version_is_known() -> None:
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields <= {*USED.split(), *REFUSED}, "decide what becomes of these"


USED_BY_ROLLOUTS = """
    model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32
    num_generations num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset
    pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p
    generation_kwargs chat_template_kwargs repetition_penalty cache_implementation beta num_iterations
    epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
    vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
    scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo normalize_advantages
    reward_clip_range use_vllm entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max
    entropy_coef_delta entropy_target top_entropy_quantile
"""
"""What trainers use themselves that generate completions; some values of a few are refused."""
OF_WHAT_IS_REFUSED = """
    max_tool_calling_iterations transformers_continuous_batching_config
"""
"""What says more about what is refused."""


@pytest.mark.parametrize("kind", ["GRPOConfig", "RLOOConfig"])
def test_each_field_of_rollouts_is_known(kind: str) -> None:
    import transformers
    import trl

    of_all = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    own = {field.name for field in dataclasses.fields(getattr(trl, kind))} - of_all
    known = {*USED_BY_ROLLOUTS.split(), *OF_WHAT_IS_REFUSED.split(), *REFUSED}
    unknown = {name for name in own - known if not name.startswith("vllm_")}  # TRL's own
    assert not unknown, "decide what becomes of these"


def hooks_and_a_subclass() -> dict[str, Any]:
    """What callbacks and a loss of the user's own see."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tests.integrations.real.trainers import SETTINGS, Padding, llama
    from torchtune_adaptive.integrations.transformers import AdaptiveTrainerMixin

    seen: dict[str, list[Any]] = {"gradient": [], "step": [], "loss": []}

    class Watching(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            gradients = [parameter.grad for parameter in named["model"].parameters()]
            seen["gradient"].append(all(each is not None and each.any() for each in gradients))

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            seen["step"].append(state.global_step)

    class Doubled(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    class AdaptiveDoubled(AdaptiveTrainerMixin, Doubled):
        pass

    steps = 0
    for kind in (Doubled, AdaptiveDoubled):
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, **SETTINGS)
            trainer: Any = kind(
                llama(), arguments, Padding(), tokens(ragged=True), callbacks=[Watching()]
            )
            if kind is AdaptiveDoubled:
                lose_memory(trainer, Loss())
            trainer.create_optimizer()
            steps = 0

            def counted(*_: Any) -> None:
                nonlocal steps
                steps += 1

            trainer.optimizer.register_step_post_hook(counted)
            trainer.train()
            seen["loss"].append([entry["loss"] for entry in trainer.state.log_history[:-1]])
            assert steps == 4
    a, b = (torch.tensor(each) for each in seen["loss"])
    return {
        "gradient": seen["gradient"],
        "step": seen["step"],
        "loss": float((a / b - 1).abs().max()),
    }


def test_callbacks_and_a_loss_of_the_users_own() -> None:
    [seen] = on_ranks(hooks_and_a_subclass, 1)
    assert seen["gradient"] == [True] * 8 and seen["step"] == [1, 2, 3, 4] * 2
    assert seen["loss"] <= 1e-6
