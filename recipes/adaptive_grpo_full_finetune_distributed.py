"""Group relative policy optimization (GRPO) that finds its own batch sizes.

    tune run --nproc_per_node 8 adaptive_grpo_full_finetune_distributed --config mine.yaml \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptiveGRPOFullFinetuneRecipeDistributed(AdaptiveRecipe):
    """GRPO of all weights with FSDP2, on one rank or many; the reference is a second model.

    It accepts the keys of ``dev/grpo_full_finetune_distributed`` of torchtune's main branch. In a rollout,
    rows are generated, scored and trained on. ``use_maximum_batch_size: True`` finds the most rows that fit
    in each of these phases; prompts, samples and steps stay as configured.
    """

    kind = "grpo"


recipe_main = launch.recipe(AdaptiveGRPOFullFinetuneRecipeDistributed.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
