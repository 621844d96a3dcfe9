"""Which of Liger's kernels (0.8.5) a step has, and for which types of models, without torch."""

from __future__ import annotations

from collections.abc import Mapping

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.library.model_types import type_of

HEAD, LOSS = "fused_linear_cross_entropy", "cross_entropy"
KERNELS = ("rope", "rms_norm", "swiglu", "geglu", HEAD, LOSS)
"""What ``liger_kernel_config`` switches on and off; ``geglu`` is for Gemma what ``swiglu`` is for others."""
_DEFAULTS = {**dict.fromkeys(KERNELS, True), LOSS: False}
IN_PLACE = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "smollm3"), True),
    "gemma": True,
    **dict.fromkeys(("gemma2", "gemma3_text"), False),
}
"""The types that are planned, and whether their norms write gradients over those that they get."""
_GATED_BY_GELU = ("gemma", "gemma2", "gemma3_text")
OWN_LOSS = ("mistral", "ministral")
"""Types for which Liger replaces a name that their loss does not use any more."""


def check_kernels(switches: Mapping[str, bool] | None, has_head: bool) -> None:
    """Raise if no such kernels can be switched on and off, by a trainer that may have a head of its own.

    Raises:
        UsageError: they cannot.
    """
    if switches is None:
        return
    if not isinstance(switches, Mapping) or not all(
        name in KERNELS and value in (True, False, None) for name, value in switches.items()
    ):
        raise UsageError(
            f"liger_kernel_config: {switches!r} must be true or false for some of {', '.join(KERNELS)}. "
            "Leave others out: they change no layer that is planned."
        )
    if has_head and switches.get(HEAD):
        raise UsageError(
            f"liger_kernel_config: {HEAD} replaces the head, which TRL 1.16 refuses. Leave it out."
        )
    if not has_head and switches.get(LOSS) and switches.get(HEAD, True):
        raise UsageError(
            f"liger_kernel_config: {LOSS} and {HEAD} exclude each other, and the second is on by default. "
            "Set one of them to false."
        )


def refuse_types(folder: str) -> None:
    """Refuse a model whose type has no kernels, or other ones than are planned.

    Raises:
        UsageError: it is one.
    """
    if (kind := type_of(folder)) not in IN_PLACE:
        raise UsageError(
            f"use_liger_kernel: what Liger replaces in {kind or 'this type'} is not planned; it is in "
            f"{', '.join(IN_PLACE)}. If Liger has no kernels for it, it leaves the model as it is: plan "
            "without them."
        )


def about_liger(folder: str, switches: Mapping[str, bool] | None, has_head: bool) -> str:
    """Which kernels are planned, for people."""
    chosen = chosen_kernels(type_of(folder), switches, has_head)
    named = ", ".join(name for name in KERNELS if chosen[name]) or "none"
    return f"kernels: of Liger 0.8.5 ({named}), compared with its source"


def chosen_kernels(
    kind: str, switches: Mapping[str, bool] | None, has_head: bool
) -> dict[str, bool]:
    """Whether each kernel is on for a type."""
    chosen = {**_DEFAULTS, **(switches or {})}
    chosen["geglu" if kind not in _GATED_BY_GELU else "swiglu"] = False
    if has_head:
        chosen[HEAD] = chosen[LOSS] = False
    return {name: bool(value) for name, value in chosen.items()}
