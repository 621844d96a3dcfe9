"""Everything that is wrong in a config, for whoever corrects it; a run ends with the first."""

from __future__ import annotations

from omegaconf import DictConfig

from torchtune_adaptive.common import ConfigError
from torchtune_adaptive.recipe.components import check_components
from torchtune_adaptive.recipe.settings.checks import check_together, read, require_torchvision
from torchtune_adaptive.recipe.settings.kind_table import kind_of
from torchtune_adaptive.recipe.settings.mistakes import Mistakes
from torchtune_adaptive.recipe.train.growth import batch_increase


def mistakes_in(cfg: DictConfig) -> list[ConfigError]:
    """What a run of a config would complain of before it looks for files, in the order in which it would.

    Combinations are only looked at once every value is right by itself: they would be wrong for no other
    reason.
    """
    mistakes = Mistakes()
    with mistakes:
        require_torchvision(cfg)
    with mistakes:  # what it is for, and that it can be read, come before all else
        kind = kind_of(cfg)
        asked = read(cfg, kind, mistakes)
        if not mistakes.found:
            check_together(asked, mistakes)
        wrong = {one.key for one in mistakes.found}
        if "batch_increase_function" not in wrong:
            with mistakes:
                batch_increase(asked)
        of_components = Mistakes()
        check_components(cfg, kind, of_components, wrong)
        mistakes.found += [one for one in of_components.found if one.key not in wrong]
    return mistakes.found
