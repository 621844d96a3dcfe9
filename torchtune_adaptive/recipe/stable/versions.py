"""``torchtune_adaptive.versions``, as copied recipes import it."""

from torchtune_adaptive.recipe.versions import require_supported_versions

__all__ = ["require_supported_versions"]
