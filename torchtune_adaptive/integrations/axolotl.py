"""Axolotl with trainers that find their micro-batch, by one line of its YAML.

    plugins: [torchtune_adaptive.integrations.axolotl.AdaptivePlugin]
    adaptive: {memory_limit: 24GiB}

The second line has the options of ``Adaptive``, and may be left out.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import fields
from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found, unused-ignore]
from pydantic import BaseModel  # type: ignore[import-not-found, unused-ignore]

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.integrations.options import Adaptive
from torchtune_adaptive.integrations.script import adapt_trainers

_NAME = "torchtune_adaptive"


class AdaptiveArgs(BaseModel):  # type: ignore[misc, unused-ignore]
    """The keys that the plugin adds to Axolotl's."""

    adaptive: dict[str, Any] | None = None


class AdaptivePlugin(BasePlugin):  # type: ignore[misc, unused-ignore]
    """Has every trainer that Axolotl makes be adaptive.

    It does not use ``get_trainer_cls``: there, only one plugin has a say, and in preference tuning a plugin's
    trainer is not given the arguments of Axolotl's own.
    """

    _options = Adaptive()

    def register(self, cfg: dict[str, Any]) -> None:
        self._options = _options_in(cfg.get("adaptive") or {})
        if cfg.get("sample_packing") and self._options.search:
            raise UsageError(
                "sample_packing: Axolotl fills bins with rows when it loads them, so there is no longest one "
                "to try. Set adaptive: {search: false}, or sample_packing: false."
            )

    def get_input_args(self) -> str:
        return f"{AdaptiveArgs.__module__}.{AdaptiveArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        _show_lines()
        adapt_trainers(self._options, "Axolotl")


def _show_lines() -> None:
    """Show what is said on rank 0: of other packages, Axolotl shows warnings only."""
    ours = logging.getLogger(_NAME)
    if ours.handlers:
        return
    for name in [_NAME, *logging.root.manager.loggerDict]:
        if name.partition(".")[0] == _NAME:
            logging.getLogger(name).filters.clear()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"{_NAME}: %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def _options_in(given: Any) -> Adaptive:
    known = [field.name for field in fields(Adaptive)]
    if not isinstance(given, dict) or not {*given} <= {*known}:
        raise UsageError(f"adaptive: {given!r} is no mapping of some of {', '.join(known)}.")
    return Adaptive(**given)
