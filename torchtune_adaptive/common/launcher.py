"""The environment that a launcher, such as torchrun, gives a process: all there is before the ranks join a
process group, which is when ``core.Ranks`` takes over."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

OWN_GROUP = "torchtune-adaptive"
"""The description (``group_desc``) of our own process groups, in which no model launches anything."""

LAUNCH = "TORCHTUNE_ADAPTIVE_LAUNCH"
"""The variable that tells a launcher from all others which uses torchrun anew for each attempt."""


def signal_when_parent_ends(number: int) -> None:
    """Let this process get a signal when the one that has started it ends, however that ends (Linux)."""
    pr_set_pdeathsig = 1  # of <linux/prctl.h>
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def stop_when_it_ends() -> None:
    """Let this rank be asked to stop when torchrun ends, which cannot do that if it is killed."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    signal_when_parent_ends(signal.SIGTERM)
    # It has ended already if another process has this one, and is not torchrun as the first of a container.
    if os.getppid() == 1 and "python" not in os.path.realpath("/proc/1/exe"):
        signal.raise_signal(signal.SIGTERM)


def has_started_this() -> bool:
    return "RANK" in os.environ


def rank() -> int:
    """The rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """The rank among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def local_size() -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def size() -> int:
    """The number of ranks on all machines."""
    return int(os.environ.get("WORLD_SIZE", 1))


def restarts() -> int:
    """How often torchrun has started the ranks of this machine again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def max_restarts() -> int:
    """How often torchrun may do so (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def launch() -> str | None:
    """What tells the launcher of this rank from all others, if it may start ranks again."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or not max_restarts():
        return None
    return os.environ.get(LAUNCH) or str(Path(file).parents[2])


def shares_store() -> bool:
    """Whether ranks meet in a key-value store of torchrun, which has the keys of all attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def use_first(ranks: int) -> None:
    """Let this process see the first ``ranks`` only, of which it is one."""
    others = rank() - local_rank()  # on machines before this one
    os.environ["LOCAL_WORLD_SIZE"] = str(min(local_size(), ranks - others))
    os.environ["WORLD_SIZE"] = str(ranks)
