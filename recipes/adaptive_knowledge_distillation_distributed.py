"""Knowledge distillation that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_knowledge_distillation_distributed \\
        --config llama3_2/8B_to_1B_KD_lora_distributed use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptiveKDRecipeDistributed(AdaptiveRecipe):
    """Distillation of a teacher into adapters of a student with FSDP2, on one rank or many.

    It accepts every key of torchtune's ``knowledge_distillation_distributed``. ``docs/torchtune.md`` says
    what differs. It adds what ``adaptive_full_finetune_distributed`` adds.
    """

    kind = "kd"


recipe_main = launch.recipe(AdaptiveKDRecipeDistributed.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
