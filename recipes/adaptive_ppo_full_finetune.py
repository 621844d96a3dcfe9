"""Proximal policy optimization (PPO) that finds its own batch sizes.

    tune run adaptive_ppo_full_finetune --config mistral/7B_full_ppo_low_memory \\
        use_maximum_batch_size=True compile=False optimizer_in_bwd=False
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptivePPOFullFinetuneRecipe(AdaptiveRecipe):
    """PPO of all weights of a policy and a value model; the reference and the reward model are two more.

    It accepts the keys of torchtune's ``ppo_full_finetune_single_device``. In a rollout, rows are generated,
    scored and trained on. ``use_maximum_batch_size: True`` finds the most rows that fit in each of these
    phases; prompts, mini-batches and steps stay as configured.
    """

    kind = "ppo"


recipe_main = launch.recipe(AdaptivePPOFullFinetuneRecipe.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
