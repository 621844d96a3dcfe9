"""The recipes are a distribution of their own, on top of this one: most commands need them, and torchtune."""

from __future__ import annotations

from torchtune_adaptive.common import AdaptiveBatchingError


def require_recipes(command: str) -> None:
    """Put the recipes into torchtune's registry, for this process, which may then import ``recipe``.

    Raises:
        AdaptiveBatchingError: they are not installed; the message says that ``command`` needs them.
    """
    try:
        from torchtune_adaptive.recipe import register, require_supported_versions

        require_supported_versions()  # before torchtune is imported, which fails less clearly
    except ImportError as error:
        raise AdaptiveBatchingError(
            f"{command} needs torchtune and the recipes, which are not installed ({error}). In a clone of "
            "torchtune-adaptive: pip install ./library ."
        ) from None
    register()
