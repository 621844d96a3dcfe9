"""FSDP2 in trainers of transformers and TRL on a CPU, whose accelerate gives it to accelerators only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fsdp2_on_cpu(casts: bool = False) -> None:
    """Let accelerate shard on a CPU as well; everything else works there. FSDP2 ``casts`` what it gathers, as
    on a GPU with mixed precision, or leaves that to autocast."""
    import accelerate.state

    init = accelerate.state.AcceleratorState.__init__

    def told(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        fsdp_plugin = fsdp_plugin or vars(self).get("fsdp_plugin")  # each other state sets it back
        if fsdp_plugin is not None:
            self.distributed_type = accelerate.state.DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if casts and self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    accelerate.state.AcceleratorState.__init__ = told


def first_of(ranks: int, *program: str) -> Any:
    """What the first rank of a program tells."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *launch, *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def tell(found: Callable[[], Any]) -> None:
    """Find something on each rank, in a folder of its own, and tell what the first one has found."""
    rank = os.environ["RANK"]
    Path(rank).mkdir(exist_ok=True)
    os.chdir(rank)
    fsdp2_on_cpu(casts=True)
    result = found()
    if rank == "0":
        print(json.dumps(result))
    time.sleep(0.1)  # a thread of gloo that takes Python's lock after its end aborts the process
