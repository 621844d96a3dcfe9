from types import SimpleNamespace
from typing import Any


def trainer_init(init_info: dict[str, Any]) -> Any:
    """Join the group over which weights go to the server."""
    assert init_info["world_size"] == 2 and init_info["rank_offset"] == 1
    return SimpleNamespace(group=SimpleNamespace(store=None, socket=None))
