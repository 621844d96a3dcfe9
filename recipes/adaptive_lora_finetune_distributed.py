"""LoRA fine-tuning that finds its own batch size.

    tune run --nproc_per_node 8 adaptive_lora_finetune_distributed --config llama3_1/8B_lora \\
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
from torchtune_adaptive.checkpoints.checkpoints import LoRACheckpoints
from torchtune_adaptive.run import Run
from torchtune_adaptive.setup.model import lora_model
from torchtune_adaptive.setup.optimizer import build_optimizers
from torchtune_adaptive.train.loop import TrainingLoop


class AdaptiveLoRAFinetuneRecipeDistributed(FTRecipeInterface):
    """LoRA, DoRA and QLoRA fine-tuning of a dense text model with FSDP2, on one rank or many.

    It accepts every key of torchtune's ``lora_finetune_distributed`` and does the same with it. It adds what
    ``adaptive_full_finetune_distributed`` adds.

    Args:
        cfg: the config, including overrides from the command line.

    Raises:
        ConfigError: a setting that cannot work; nothing has been built yet.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.run = Run(cfg, "lora")
        self._loop: TrainingLoop | None = None

    def setup(self, cfg: DictConfig) -> None:
        """Load the model, its adapters and their optimizer; the rest is common to all recipes."""
        run = self.run
        run.watchdog.enter("loading the model", patience=None)
        self._checkpoints = checkpoints = LoRACheckpoints(cfg, run.environment)
        checkpoint = checkpoints.load()
        adapters = checkpoint.get(training.ADAPTER_KEY)
        model = lora_model(cfg, run.environment, checkpoint[training.MODEL_KEY], adapters)
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
    """LoRA fine-tuning that finds its own batch size."""
    recipe = AdaptiveLoRAFinetuneRecipeDistributed(cfg)
    config.log_config(recipe_name="AdaptiveLoRAFinetuneRecipeDistributed", cfg=cfg)
    with recipe.run:
        recipe.setup(cfg)
        recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
