"""``torchtune_adaptive.tiny``, as configs name it."""

from torchtune_adaptive.recipe.tiny import two_more_rows

__all__ = ["two_more_rows"]
