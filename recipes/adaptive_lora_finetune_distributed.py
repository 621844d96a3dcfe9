"""LoRA fine-tuning that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_lora_finetune_distributed --config llama3_1/8B_lora \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptiveLoRAFinetuneRecipeDistributed(AdaptiveRecipe):
    """LoRA, DoRA and QLoRA fine-tuning of a dense text model with FSDP2, on one rank or many.

    It accepts every key of torchtune's ``lora_finetune_distributed`` and does the same with it. It adds what
    ``adaptive_full_finetune_distributed`` adds.
    """

    kind = "lora"


recipe_main = launch.recipe(AdaptiveLoRAFinetuneRecipeDistributed.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
