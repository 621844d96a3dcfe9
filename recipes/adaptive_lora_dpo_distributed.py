"""Direct preference optimization (DPO) with LoRA that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_lora_dpo_distributed --config llama3_1/8B_lora_dpo \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptiveLoRADPORecipeDistributed(AdaptiveRecipe):
    """DPO of adapters with FSDP2, on one rank or many; the model without them is the reference.

    It accepts every key of torchtune's ``lora_dpo_distributed`` and does the same with it. It adds what
    ``adaptive_full_finetune_distributed`` adds. The micro-batch counts pairs.
    """

    kind = "lora_dpo"


recipe_main = launch.recipe(AdaptiveLoRADPORecipeDistributed.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
