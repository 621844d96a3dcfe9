"""Flex attention, which torchtune has for packed rows on a GPU, and always compiles.

That is apart from ``compile: True``, and without dynamic shapes: once for each number of rows, and again
where other inputs have gradients.
"""

from __future__ import annotations

import torch
import torch.compiler.config as limits

from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.upstream import has_flex_attention


def compiles(asked: Asked) -> bool:
    """Whether a run compiles anything: a rank may then take long where another one has it in its cache."""
    dropout = asked.settings.dropout == "sample" and asked["device"] != "cpu"
    return bool(asked["compile"]) or dropout or compiles_attention(asked)


def compiles_attention(asked: Asked) -> bool:
    """Whether a run compiles attention, on which ``compile`` has no influence."""
    packed = asked.packed() or asked.packed("dataset_val")
    return packed and has_flex_attention(torch.device(asked["device"]))


def compile_for_every_size(asked: Asked) -> None:
    """Allow as many compilations of a function as all of its variants together may have (256).

    By default there are eight, and then torch runs the function as it is, with one warning in all. Flex
    attention keeps all scores then, and a search, validation, growth and recovery meet more than eight sizes.
    Nor do eight suffice for the layers of up to four models of a rollout, each with gradients and without.
    The limit holds for the thread that sets it; backward's threads only need what forward has compiled.
    """
    layers = asked["compile"] and asked.kind.generates
    if layers or compiles_attention(asked):
        limits.recompile_limit = max(limits.recompile_limit, limits.accumulated_recompile_limit)
