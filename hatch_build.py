"""What the recipes need, which is also the library of the same version."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Dependencies(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        library = f"torchtune-adaptive-library=={metadata['version']}"
        metadata["dependencies"] = [library, *self.config["dependencies"]]
