"""What the ranks of a run have imported when they start: a server imports this once, and forks each rank.

Threads and CUDA do not survive a fork, so no module here may start the one or initialize the other. Nor may
it read a variable of the environment that differs from rank to rank: those are set after the fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
from contextlib import suppress

from torchtune_adaptive.cli.forked_rank import ASKED_TO_STOP
from torchtune_adaptive.common import launcher
from torchtune_adaptive.core import before_fork

# The server is not to look for modules in the working directory; what ranks start may, as with any launcher.
if os.environ.get("PYTHONSAFEPATH") == __name__:
    del os.environ["PYTHONSAFEPATH"]
MODULES = (
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torchdata.stateful_dataloader",
    "torchtune.datasets",
    "torchtune.recipe_interfaces",
    "torchtune_adaptive.recipe.adaptive_recipe",
    "torchtune_adaptive.recipe.launch",
    "torchtune_adaptive.recipe.versions",
)

# A signal to the whole job is for its ranks; the server must be there when they end, or nobody learns how.
# Blocked ones are not lost: a rank gets them when it has started.
signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_TO_STOP)
# The server ends with the launcher, however that ends, and the ranks with the server, as with any launcher.
launcher.signal_when_parent_ends(signal.SIGKILL)

gc.disable()  # collections while modules are imported find nothing
with before_fork.cuda_uninitialized():
    for _module in MODULES:
        # matplotlib need not be there; a rank says what else is missing.
        with suppress(ImportError):
            importlib.import_module(_module)
gc.freeze()  # nor do later ones, in what was imported; and what nobody touches, ranks share
gc.enable()

THREADS = [thread.name for thread in threading.enumerate()[1:]]
"""Threads that were started by imports, which ranks would not have."""
