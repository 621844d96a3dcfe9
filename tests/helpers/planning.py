"""What the command line asks of a plan."""

from __future__ import annotations

import argparse

from torchtune_adaptive.cli.plan_options import add_arguments, parsed


def asked(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parsed(parser, words)
