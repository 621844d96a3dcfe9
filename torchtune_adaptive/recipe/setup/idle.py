"""Ranks that a resumed run has no use for: what its config divides over ranks does not come out even on all.

A run that begins so is refused instead. But one that has lost a GPU goes on with as many as it can use. The
others wait until it is over: a launcher whose ranks have all ended would end the rendezvous for everyone.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torchtune.modules.peft import LoRALinear

from torchtune_adaptive.common import counted, launcher, listed
from torchtune_adaptive.recipe.components import make
from torchtune_adaptive.recipe.private import has_quantized_base
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.settings.keys import CONTEXT, COPIES, TENSORS

log = logging.getLogger(__name__)

_DONE = f"{launcher.OWN_GROUP}: the run is done"
_MEETING = timedelta(minutes=10)
"""The time that the ranks may need to start, as torchrun's own rendezvous allows it."""
_PAUSE = 1.0
"""Seconds after which an idle rank looks again whether the run is over."""


def leave_out_idle_ranks(asked: Asked) -> Callable[[], None]:
    """Continue with the ranks that can be used; on the others, wait until the run is done, and exit.

    Returns:
        A function that tells the others so. Not after a failure: then the launcher ends them, too.
    """
    ranks = launcher.size()
    usable = usable_ranks(asked, ranks) if asked["resume_from_checkpoint"] else ranks
    if usable == ranks:
        return lambda: None
    rank = launcher.rank()
    store, *_ = next(dist.rendezvous("env://", timeout=_MEETING))
    if rank >= usable:
        _wait_for(_DONE, store)
        sys.exit(0)
    launcher.use_first(usable)
    if rank == 0:
        idle = listed("rank", [str(each) for each in range(usable, ranks)])
        log.warning(
            f"{counted(usable, 'rank')} of {ranks} are used, and {idle} idle: {_divided(asked)} cannot be "
            "divided over more of them."
        )
    return partial(store.set, _DONE, "") if rank == 0 else lambda: None


def usable_ranks(asked: Asked, ranks: int) -> int:
    """The most of the ranks that a config can use; all, if it can use none."""
    together = math.prod(asked[key] for key in (TENSORS, CONTEXT, COPIES))
    rows = _rows_to_divide(asked)
    for usable in range(ranks - ranks % together, 0, -together):
        if usable == asked.holders or rows % usable == 0:
            return usable
    return ranks


def _rows_to_divide(asked: Asked) -> int:
    """The number that the used ranks must divide: FSDP pads neither quantized weights nor those that tensor
    parallelism has split before. 0 where there are none."""
    quantized = asked.quantized_weights and asked.kind.adapters
    if not quantized and asked.holders == 1:
        return 0
    with torch.device("meta"):
        model = make(asked.cfg.model, "model")
    rows = (
        module.weight.shape[0]
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.Embedding, LoRALinear))
        and (not quantized or has_quantized_base(module))
    )
    return math.gcd(*rows)


def _divided(asked: Asked) -> str:
    """What the config divides over ranks, in words."""
    keys = [f"{key}={asked[key]}" for key in (TENSORS, CONTEXT, COPIES) if asked[key] > 1]
    return f"the model, with {' and '.join(keys)}," if keys else "the quantized weights"


def _wait_for(key: str, store: dist.Store) -> None:
    """Wait until a key is set, or the store or the launcher is gone."""
    parent = os.getppid()
    with suppress(dist.DistError):
        while os.getppid() == parent and not store.check([key]):
            time.sleep(_PAUSE)
