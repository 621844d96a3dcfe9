"""``torchtune_adaptive.launch``, as copied recipes import it."""

from torchtune_adaptive.recipe.launch import recipe

__all__ = ["recipe"]
