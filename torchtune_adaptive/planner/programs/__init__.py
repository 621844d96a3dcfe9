"""A program of the user's own, run on the fake device up to its third optimizer step, and its steps there.

Nothing of a trainer is described here: whatever the program imports does what it does. ``run.py`` begins it,
and says what the other modules do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtune_adaptive.common.lazy import interface

if TYPE_CHECKING:
    from torchtune_adaptive.planner.programs.commands import command
    from torchtune_adaptive.planner.programs.notes import note
    from torchtune_adaptive.planner.programs.process import (
        plan_program,
        remembered_plan,
        table_of,
        tabulate,
    )
    from torchtune_adaptive.planner.programs.request import (
        CHECKPOINTED,
        GENERATION,
        OnGpus,
        Program,
        ProgramPlan,
        of_trainer,
        words_of_trainer,
    )
else:
    __getattr__, __dir__, __all__ = interface(__name__)
