"""Full fine-tuning that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_full_finetune_distributed --config llama3_1/8B_full \\
        use_maximum_batch_size=True
"""

# ruff: noqa: E402
from torchtune_adaptive.versions import require_supported_versions

require_supported_versions()  # before the imports below, which fail less clearly

import sys

from omegaconf import DictConfig
from torchtune import config, training
from torchtune.recipe_interfaces import FTRecipeInterface

from torchtune_adaptive import launch
from torchtune_adaptive.checkpoints.checkpoints import FullCheckpoints
from torchtune_adaptive.run import Run
from torchtune_adaptive.setup.model import full_model
from torchtune_adaptive.setup.optimizer import build_optimizers
from torchtune_adaptive.train.loop import TrainingLoop


class AdaptiveFullFinetuneRecipeDistributed(FTRecipeInterface):
    """Full fine-tuning of a dense text model with FSDP2, on one rank or many.

    It accepts every key of torchtune's ``full_finetune_distributed`` and does the same with it. It adds:

    - ``use_maximum_batch_size: True`` searches for the largest micro-batch that fits, with the model, the
      optimizer and the data of the run, then trains as if ``batch_size`` had been set to it.
    - ``adaptive_batching`` configures the search and training; see ``AdaptiveSettings`` for each key.

    Faults that torchtune lets pass stop the run or are corrected: a misspelled key, a batch larger than the
    data, gradients that leak from the end of one epoch into the next.

    Args:
        cfg: the config, including overrides from the command line.

    Raises:
        ConfigError: a setting that cannot work; nothing has been built yet.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.run = Run(cfg, "full")
        self._loop: TrainingLoop | None = None

    def setup(self, cfg: DictConfig) -> None:
        """Load the model and its optimizer; the rest is common to all recipes."""
        run = self.run
        run.watchdog.enter("loading the model", patience=None)
        self._checkpoints = checkpoints = FullCheckpoints(cfg, run.environment)
        checkpoint = checkpoints.load()
        model = full_model(cfg, run.environment, checkpoint[training.MODEL_KEY])
        state = checkpoint.get(training.OPT_KEY)
        optimizers = build_optimizers(cfg, run.environment, model.module, state)
        checkpoints.resume(model, optimizers, run.progress, checkpoint)
        self._loop = run.prepare(model, optimizers, checkpoints.save)

    def train(self) -> None:
        if self._loop is not None:
            self._loop.run()

    def cleanup(self) -> None:
        self._checkpoints.close()
        self.run.close()


@launch.recipe
def recipe_main(cfg: DictConfig) -> None:
    """Full fine-tuning that finds its own batch size."""
    recipe = AdaptiveFullFinetuneRecipeDistributed(cfg)
    config.log_config(recipe_name="AdaptiveFullFinetuneRecipeDistributed", cfg=cfg)
    with recipe.run:
        recipe.setup(cfg)
        recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
