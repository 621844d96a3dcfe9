"""Group relative policy optimization (GRPO) with LoRA that finds its own batch sizes.

    tune run --nproc_per_node 8 adaptive_grpo_lora_finetune_distributed --config mine.yaml \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptiveGRPOLoRAFinetuneRecipeDistributed(AdaptiveRecipe):
    """GRPO of adapters with FSDP2, on one rank or many; the model without them is the reference.

    It accepts the keys of ``adaptive_grpo_full_finetune_distributed``, apart from ``ref_checkpointer`` and
    ``enable_async_checkpointing``, and those of torchtune's ``lora_finetune_distributed``, and does the same.
    """

    kind = "grpo_lora"


recipe_main = launch.recipe(AdaptiveGRPOLoRAFinetuneRecipeDistributed.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
