"""The kinds of recipe by their names, which are those of ``settings.kind_table.KINDS``."""

from __future__ import annotations

from torchtune_adaptive.recipe.kinds.grpo import FullGRPO, LoRAGRPO
from torchtune_adaptive.recipe.kinds.kd import KD
from torchtune_adaptive.recipe.kinds.ppo import PPO
from torchtune_adaptive.recipe.kinds.preference import FullDPO, LoRADPO
from torchtune_adaptive.recipe.kinds.quantization import QAT, QATLoRA
from torchtune_adaptive.recipe.kinds.recipe_kind import Full, LoRA, RecipeKind
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import Environment

RECIPE_KINDS: dict[str, type[RecipeKind]] = {
    "full": Full,
    "lora": LoRA,
    "full_dpo": FullDPO,
    "lora_dpo": LoRADPO,
    "kd": KD,
    "qat": QAT,
    "qat_lora": QATLoRA,
    "grpo": FullGRPO,
    "grpo_lora": LoRAGRPO,
    "ppo": PPO,
}


def recipe_kind(asked: Asked, environment: Environment) -> RecipeKind:
    """The kind of recipe that was asked for."""
    return RECIPE_KINDS[asked.kind.name](asked, environment)
