"""The versions of other libraries with which planned steps were compared, and what is said of those here."""

from __future__ import annotations

from torchtune_adaptive.common import versions_of

CHECKED = {
    "transformers": "5.23",
    "trl": "1.16",
    "peft": "0.21",
    "accelerate": "1.15",
    "bitsandbytes": "0.50",
}


def about_versions(*names: str) -> tuple[str, ...]:
    """Which versions are installed, and a warning for each that no plan was compared with, for people."""
    found = versions_of(*names)
    here = ", ".join(f"{name} {installed or 'none'}" for name, installed in found.items())
    warnings = (
        f"WARNING: no plan was compared with {name} {installed}: the step is that of {name} {CHECKED[name]}"
        for name, installed in found.items()
        if installed and installed.split(".")[:2] != CHECKED[name].split(".")
    )
    return (f"installed: {here}", *warnings)
