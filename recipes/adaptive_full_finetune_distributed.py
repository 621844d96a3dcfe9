"""Full fine-tuning that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_full_finetune_distributed --config llama3_1/8B_full \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.recipe import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

from torchtune_adaptive.recipe import AdaptiveRecipe, launch


class AdaptiveFullFinetuneRecipeDistributed(AdaptiveRecipe):
    """Full fine-tuning of a dense text model with FSDP2, on one rank or many.

    It accepts every key of torchtune's ``full_finetune_distributed`` and does the same with it. It adds:

    - ``use_maximum_batch_size: True`` searches for the largest micro-batch that fits, with the model, the
      optimizer and the data of the run, then trains as if ``batch_size`` had been set to it.
    - ``adaptive_batching`` configures the search and training; see ``AdaptiveSettings`` for each key.

    Faults that torchtune lets pass stop the run or are corrected: a misspelled key, a batch larger than the
    data, gradients that leak from the end of one epoch into the next.
    """

    kind = "full"


recipe_main = launch.recipe(AdaptiveFullFinetuneRecipeDistributed.run_all, __doc__)

if __name__ == "__main__":
    recipe_main()
