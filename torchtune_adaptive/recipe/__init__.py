"""What torchtune's recipes become: from a config to a trained model.

It may import every package but the command line's. Begin with ``adaptive_recipe.py``, which is what all
recipes have in common, and ``run.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.common.lazy import interface

if TYPE_CHECKING:
    from torchtune_adaptive.recipe import launch
    from torchtune_adaptive.recipe.adaptive_recipe import AdaptiveRecipe
    from torchtune_adaptive.recipe.plan.limits import (
        TOKENS,
        LengthLimits,
        confirm,
        largest_adapter_rank,
    )
    from torchtune_adaptive.recipe.plan.predict import Prediction, compare, predict
    from torchtune_adaptive.recipe.plan.query import Query
    from torchtune_adaptive.recipe.plan.ranking import (
        Candidate,
        chosen,
        merged,
        other_builds,
        rank_candidates,
        too_close_to_call,
    )
    from torchtune_adaptive.recipe.plan.request import PlanRequest, on_devices, plan_request
    from torchtune_adaptive.recipe.plan.rollout import RolloutPrediction
    from torchtune_adaptive.recipe.plan.table import tabulated
    from torchtune_adaptive.recipe.proofreading import mistakes_in
    from torchtune_adaptive.recipe.registry import (
        RECIPES,
        configs_of_model,
        file_of_recipe,
        find_config,
        is_config_name,
        is_module,
        is_recipe,
        load_config,
        nearest_recipe,
        our_recipe_for,
        register,
        runs_on_ranks,
        torchtune_recipes,
        with_overrides,
    )
    from torchtune_adaptive.recipe.settings.adaptive import BLOCK
    from torchtune_adaptive.recipe.settings.asked import ACCUMULATION, Asked
    from torchtune_adaptive.recipe.settings.checks import warn_of_unused_keys
    from torchtune_adaptive.recipe.settings.keys import TENSORS
    from torchtune_adaptive.recipe.settings.kind_table import kind_of
    from torchtune_adaptive.recipe.settings.knob_table import (
        FUSED,
        KNOBS,
        KNOBS_BY_KEY,
        WHOLE,
        configured_checkpoint,
        overrides,
    )
    from torchtune_adaptive.recipe.shadowing import stop_if_shadowed
    from torchtune_adaptive.recipe.tracing.self_check import check_method
    from torchtune_adaptive.recipe.tracing.traces import NotRemembered, PassedCheck
    from torchtune_adaptive.recipe.versions import require_supported_versions
else:
    __getattr__, __dir__, __all__ = interface(__name__)
