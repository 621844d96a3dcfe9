"""Out-of-memory recovery and the batch search inside trainers of other libraries.

It may import ``common``, ``core`` and ``library``, and imports another library where it is used. Begin with
``transformers.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.common.lazy import interface

if TYPE_CHECKING:
    from torchtune_adaptive.integrations.options import Adaptive
    from torchtune_adaptive.integrations.script import run_script
else:
    __getattr__, __dir__, __all__ = interface(__name__)
