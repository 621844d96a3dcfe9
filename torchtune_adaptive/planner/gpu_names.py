"""Reads the names of GPUs, as users write them and as torch prints them: ``4090``, ``NVIDIA H100 80GB HBM3``.

Our names are a model and how many GB it is sold with: ``rtx4090-24gb``. A name that is read may have words
before and after its model that tell nothing, and may lack the size where the model has only one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

_VENDORS = "nvidia amd tesla quadro geforce radeon instinct rtx rx"
_AROUND = "gpu generation edition server workstation blackwell sxm hgx oam hbm hbm2 hbm2e hbm3 hbm3e vf ac"
_NOISE = {*_VENDORS.split(), *_AROUND.split(), *(f"sxm{n}" for n in range(2, 7))}
"""Words that tell no model apart. So does ``pcie``, unless we know the model in that form."""
_MEMORY_OF_CPU = {("gh200", 120): 96, ("gh200", 480): 96}
"""GB of the GPU where the GB in the name, beside the model, are those of its CPU."""
_LONGEST_SIZE = 3
"""Digits of a bare number that is taken for GB (``h100-80``) and not for a model (``rtx 4090``)."""
_CLOSE = 0.65


@dataclass(frozen=True)
class Reading:
    """What a name says."""

    size: int | None
    """GB, if it gives them."""
    same_model: tuple[str, ...]
    """Our names of the model, of any size."""

    @property
    def names(self) -> tuple[str, ...]:
        """Our names for what is meant: none if it is not known, several if the size is missing."""
        if self.size is None:
            return self.same_model
        return tuple(one for one in self.same_model if one.endswith(f"-{self.size}gb"))


def read(name: str, known: Iterable[str]) -> Reading:
    """Read a name; ``known`` are ours."""
    model, size = "", None
    for word in _words(name):
        if word in _NOISE:
            continue
        if (gigabytes := _size(word, after_model=bool(model))) and size is None:
            size = gigabytes
        else:
            model += word
    models: dict[str, list[str]] = {}
    for one in known:
        models.setdefault(_bare(one.partition("-")[0]), []).append(one)
    model = _bare(model)
    if model not in models:
        model = model.removesuffix("pcie")
    if size is not None:
        size = _MEMORY_OF_CPU.get((model, size), size)
    return Reading(size, tuple(models.get(model, ())))


def respelled(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Our names for what is meant if words around the model are misspelled: ``gefroce 4090``. A model's own
    letters and digits are never guessed, as one more or less is another card."""

    def corrected(match: re.Match[str]) -> str:
        close = get_close_matches(match[0], _VENDORS.split(), n=1, cutoff=_CLOSE)
        return f" {close[0]} " if close else match[0]

    return read(re.sub(r"[a-z]{3,}", corrected, name.lower()), known).names


def _words(name: str) -> list[str]:
    """The words of a name; a number and its unit are one, and what stands behind a slash is left out."""
    text = re.sub(r"(\d) +(?=gi?b?\b)", r"\1", name.lower().partition("/")[0])
    return re.findall(r"[a-z0-9.]+", text)


def _size(word: str, after_model: bool) -> int | None:
    """The GB of ``80gb`` and ``80g``, and of ``80`` if it stands behind a model."""
    found = re.fullmatch(r"(\d+)(g|gb|gib|)", word)
    if not found or not (found[2] or (after_model and len(found[1]) <= _LONGEST_SIZE)):
        return None
    return int(found[1])


def _bare(model: str) -> str:
    """A model without what may be glued to it: ``rtx4090`` and ``4090``, ``h100sxm`` and ``h100``."""
    return re.sub(r"^(rtx|rx)(?=(pro|a)?\d)|sxm\d?$", "", model)
