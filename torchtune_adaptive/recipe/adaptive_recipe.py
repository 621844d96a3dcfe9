"""What a recipe is, whatever its kind: the same set-up, the same training, the same end."""

from __future__ import annotations

import logging
from typing import ClassVar

from omegaconf import DictConfig
from torch import nn
from torchtune import training
from torchtune.recipe_interfaces import FTRecipeInterface

from torchtune_adaptive.recipe.checkpoints.resume_from import Finished
from torchtune_adaptive.recipe.rollout_run import RolloutRun
from torchtune_adaptive.recipe.run import Run
from torchtune_adaptive.recipe.settings.kind_table import KINDS
from torchtune_adaptive.recipe.setup.model import Model
from torchtune_adaptive.recipe.setup.optimizer import Optimizers, build_optimizers
from torchtune_adaptive.recipe.train.loop import TrainingLoop

log = logging.getLogger(__name__)


class AdaptiveRecipe(FTRecipeInterface):
    """A recipe that finds its own batch size; a subclass says of which kind it is.

    Raises:
        ConfigError: a setting that cannot work; nothing has been built yet.
    """

    kind: ClassVar[str]
    """One of ``recipe.settings.kind_table.KINDS``."""

    def __init__(self, cfg: DictConfig) -> None:
        run = RolloutRun if KINDS[self.kind].generates else Run
        self.run = run(cfg, self.kind)
        self._loop: TrainingLoop | None = None

    def setup(self, cfg: DictConfig) -> None:
        """Load the models and the optimizer, and find the batch size if that is asked for."""
        run, kind = self.run, self.run.kind
        run.load_rows()
        run.watchdog.enter("loading the model", patience=None)
        run.checkpoints = checkpoints = kind.checkpoints()
        if checkpoints.finished is not None:
            log.info(str(checkpoints.finished))
            return
        model, frozen, optimizers = self._load(cfg)
        if not run.progress.is_unfinished:
            checkpoints.save_weights(model, run.progress)
            log.info(str(Finished(str(cfg.checkpointer.output_dir), run.progress.epochs_run)))
            return
        objective = kind.objective(model.module, frozen)
        self._loop = run.prepare(model, optimizers, objective, checkpoints)

    def _load(self, cfg: DictConfig) -> tuple[Model, tuple[nn.Module, ...], Optimizers]:
        """What is trained, the models that are not, and the optimizer, as the checkpoint has them.

        A function of its own, so that nothing holds the checkpoint while the search measures memory.
        """
        run, kind, checkpoints = self.run, self.run.kind, self.run.checkpoints
        assert checkpoints is not None
        checkpoint = checkpoints.load()
        model = kind.model(checkpoint)
        frozen = kind.frozen(checkpoints.load_frozen())
        state = checkpoint.get(training.OPT_KEY)
        optimizers = build_optimizers(run.asked, run.environment, model.module, state)
        checkpoints.resume(model, optimizers, run.progress, checkpoint)
        return model, frozen, optimizers

    def train(self) -> None:
        if self._loop is not None:
            self._loop.run()

    def cleanup(self) -> None:
        """Leave the other ranks. The run has saved everything, and gives its folders to the next one."""
        self.run.close()

    @classmethod
    def run_all(cls, cfg: DictConfig) -> None:
        """What the recipe's main function does."""
        recipe = cls(cfg)
        with recipe.run:
            recipe.setup(cfg)
            recipe.train()
        recipe.cleanup()
