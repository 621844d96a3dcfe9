"""The command line, ``tune-adaptive``.

It may import every other package, but loads ``recipe`` only where a command needs it. Begin with
``command_line.py``, which has the verbs; ``plan_options.py`` and ``plan_command.py`` are the largest of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.common.lazy import interface

if TYPE_CHECKING:
    from torchtune_adaptive.cli.command_line import main
else:
    __getattr__, __dir__, __all__ = interface(__name__)
