"""What every part of a search works with: the run that is being searched on."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from torchtune_adaptive.batching.split import Split
from torchtune_adaptive.data.dataset import Data
from torchtune_adaptive.data.loader import SampleOrder
from torchtune_adaptive.ranks.agreement import Ranks
from torchtune_adaptive.ranks.watchdog import Watchdog
from torchtune_adaptive.search.worst_case import WorstCase, worst_case
from torchtune_adaptive.settings.adaptive import AdaptiveSettings
from torchtune_adaptive.step.train_step import TrainStep


@dataclass(frozen=True)
class SearchContext:
    """A run that has been set up, as far as a search needs it."""

    cfg: DictConfig
    settings: AdaptiveSettings
    configured: Split
    """The batch that the config asks for."""
    data: Data
    order: SampleOrder
    step: TrainStep
    """The step that training will use."""
    ranks: Ranks
    watchdog: Watchdog

    @property
    def compiled(self) -> bool:
        return bool(self.cfg.get("compile", False))

    def worst_case(self, length: int | None) -> WorstCase:
        """The row that trials are made of, of a given length or of the longest that the data can produce."""
        self.watchdog.enter("looking for the longest row", patience=None)
        data = self.data
        return worst_case(data.dataset, data.tokenizer, data.packed, length, self.ranks)
