"""``torchtune_adaptive.tiny_vision``, as configs name it."""

from torchtune_adaptive.recipe.tiny_vision import lora_tiny_vision, tiny_vision

__all__ = ["lora_tiny_vision", "tiny_vision"]
