"""Quantization-aware training (QAT) with LoRA that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_qat_lora_finetune_distributed --config llama3_2/1B_qat_lora \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptiveQATLoRAFinetuneRecipeDistributed(AdaptiveRecipe):
    """Training of adapters of a model that computes as if it were quantized, on one rank or many.

    It accepts every key of torchtune's ``qat_lora_finetune_distributed`` and does the same with it. It
    adds what ``adaptive_full_finetune_distributed`` adds.
    """

    kind = "qat_lora"


recipe_main = launch.recipe(AdaptiveQATLoRAFinetuneRecipeDistributed.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
