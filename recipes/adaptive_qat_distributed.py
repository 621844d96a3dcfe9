"""Quantization-aware training (QAT) that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_qat_distributed --config llama3/8B_qat_full \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptiveQATRecipeDistributed(AdaptiveRecipe):
    """Training of all weights of a model that computes as if it were quantized, on one rank or many.

    It accepts every key of torchtune's ``qat_distributed`` and does the same with it. It adds what
    ``adaptive_full_finetune_distributed`` adds.
    """

    kind = "qat"


recipe_main = launch.recipe(AdaptiveQATRecipeDistributed.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
