"""Direct preference optimization (DPO) that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_full_dpo_distributed --config llama3_1/8B_full_dpo \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptiveFullDPORecipeDistributed(AdaptiveRecipe):
    """DPO of all weights with FSDP2, on one rank or many; the reference is a second model.

    It accepts every key of torchtune's ``full_dpo_distributed`` and does the same with it. It adds what
    ``adaptive_full_finetune_distributed`` adds. The micro-batch counts pairs.
    """

    kind = "full_dpo"


recipe_main = launch.recipe(AdaptiveFullDPORecipeDistributed.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
