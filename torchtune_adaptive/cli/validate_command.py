"""``tune-adaptive validate``: everything that a run would complain of, without a run."""

from __future__ import annotations

import argparse
import sys


def validate(arguments: argparse.Namespace) -> None:
    """Check a config as a run does before it looks for files, and print all that is wrong, a line each."""
    from torchtune_adaptive.recipe import load_config, with_overrides

    cfg = with_overrides(load_config(arguments.config), arguments.overrides)
    # What follows imports torch, which takes seconds: a config that does not exist is told at once.
    from torchtune_adaptive.recipe import kind_of, mistakes_in, warn_of_unused_keys

    if mistakes := mistakes_in(cfg):
        for one in mistakes[:-1]:
            print(f"tune-adaptive: {type(one).__name__}: {one}", file=sys.stderr)
        raise mistakes[-1]
    warn_of_unused_keys(cfg, kind_of(cfg))
    print("Config is well-formed!")
