"""The keys of ``trl grpo --config`` and ``trl rloo --config``, whose trainers generate their rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchtune_adaptive.cli.other_trainers.keys import (
    FileReading,
    Joint,
    Keys,
    Refused,
    Sets,
    Trainer,
    names,
)
from torchtune_adaptive.cli.other_trainers.training_arguments import KERNELS
from torchtune_adaptive.cli.other_trainers.trl import CHECKED, COMMON, IGNORED, read_common

_CONTINUOUS = "generates with a cache of a share of the memory, which is not planned"
_BOTH: Keys = {
    **COMMON,
    "max_prompt_length": Sets("max_prompt_length", 512, null="leaves prompts as long as they are"),
    "max_completion_length": Sets(
        "max_completion_length", 512, null="lets completions get as long as the model can"
    ),
    "steps_per_generation": Sets("steps_per_generation", None),
    "generation_batch_size": Sets("generation_batch_size", None),
    "num_iterations": Sets("num_iterations", 1),
    "pad_to_multiple_of": Joint("max_prompt_length and max_completion_length, rounded up"),
    "temperature": Sets("temperature", 1.0),
    "top_p": Sets("top_p", 1.0),
    "use_vllm": Sets("use_vllm", False),
    "vllm_mode": Sets(
        *("vllm_mode", "colocate", {"colocate": "colocate", "server": "server"}),
        "is another way of TRL's, which is not planned",
    ),
    "vllm_gpu_memory_utilization": Sets("vllm_gpu_memory_utilization", 0.3),
    "vllm_enable_sleep_mode": Sets("vllm_enable_sleep_mode", False),
    "vllm_tensor_parallel_size": Sets("vllm_tensor_parallel_size", 1),
    "vllm_max_model_length": Sets("vllm_max_model_length", None),
    "disable_dropout": Joint("planned as if it were off, which takes more", False, (True, False)),
    "reward_model_name_or_path": Refused(
        "keeps a reward model in memory, whose size is not known here",
        "To plan without its memory, add reward_model_name_or_path=null",
    ),
    "generation_kwargs": Refused("may generate in another way", off=(None, {})),
    "cache_implementation": Refused("is another kind of cache", off=(None, "dynamic")),
    "use_transformers_continuous_batching": Refused(_CONTINUOUS),
    "use_transformers_paged": Refused(_CONTINUOUS),
    "use_liger_kernel": Refused(KERNELS),
    "use_liger_loss": Refused(KERNELS),
}
_GRPO: Keys = {
    **_BOTH,
    "num_generations": Sets("num_generations", 8),
    "beta": Sets("beta", 0.0),
    "vllm_importance_sampling_correction": Sets("vllm_importance_sampling_correction", True),
    "cast_lm_head_to_fp32": Refused("has a head of its own in float32, which is not planned"),
}
_RLOO: Keys = {
    **_BOTH,
    "num_generations": Sets("num_generations", 2),
    "beta": Sets("beta", 0.05),
}
_IGNORED = (IGNORED - {"pad_to_multiple_of"}) | names(
    """
    reward_funcs num_generations_eval ds3_gather_for_generation shuffle_dataset top_k min_p
    chat_template_kwargs repetition_penalty vllm_model_impl vllm_structured_outputs_regex
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port epsilon
    epsilon_high reward_weights mask_truncated_completions sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps log_completions log_multimodal num_completions_to_print log_unique_prompts
    transformers_continuous_batching_config
    """
)
_GRPO_IGNORED = names(
    """
    delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
    vespo_lambda_neg importance_sampling_level multi_objective_aggregation scale_rewards loss_type
    top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max
    entropy_coef_delta entropy_target max_tool_calling_iterations vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap
    off_policy_mask_threshold use_bias_correction_kl log_completions_hub_repo
    """
)
_RLOO_IGNORED = names("normalize_advantages reward_clip_range")


def _together(trainer: str, values: Mapping[str, Any], reading: FileReading) -> None:
    read_common(trainer, values, reading)
    unit = values["pad_to_multiple_of"]
    for key in ("max_prompt_length", "max_completion_length"):
        if isinstance(unit, int) and isinstance(length := values.get(key), int):
            reading.settings[key] = -(-length // unit) * unit
    reading.notes.append(
        "prompts: TRL 1.16 does not shorten them; max_prompt_length says how many tokens the longest of the "
        "data has"
    )


GRPO = Trainer(
    "TRL (trl grpo)",
    CHECKED,
    _GRPO,
    _IGNORED | _GRPO_IGNORED,
    partial(_together, "GRPOTrainer"),
    length="max_prompt_length",
)
RLOO = Trainer(
    "TRL (trl rloo)",
    CHECKED,
    _RLOO,
    _IGNORED | _RLOO_IGNORED,
    partial(_together, "RLOOTrainer"),
    length="max_prompt_length",
)
