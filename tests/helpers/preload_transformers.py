"""What each process that plans a step of transformers has imported when it starts."""

# ruff: noqa: F401
import transformers
import transformers.modeling_utils

import torchtune_adaptive.cli.transformers_plan
import torchtune_adaptive.library.model_steps
import torchtune_adaptive.library.rollouts_model
