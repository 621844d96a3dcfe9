"""Imports of the processes of `plan_seconds.py --whole`: those of a plan, but all layers are traced."""

import torchtune_adaptive.recipe.plan.preload  # noqa: F401
from torchtune_adaptive.planner.trace import any_depth

any_depth._KEPT = ()
