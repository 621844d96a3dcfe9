"""How sure a plan is of a predicted peak: in words, wherever one is printed."""

from __future__ import annotations

from torchtune_adaptive.common import human_bytes
from torchtune_adaptive.planner import DeviceLimits


def peak_of(device: DeviceLimits, reserved: int) -> str:
    """``20.5 GiB (+-3%) of 21.9 GiB``: a predicted peak, its error, and the usable memory."""
    return f"{human_bytes(reserved)} ({_error(device)}) of {human_bytes(device.usable_bytes)}"


def caution(device: DeviceLimits, where: str) -> str:
    """The line about a peak that is so near the usable memory that the prediction's error decides."""
    return (
        f"Caution: {where} the usable memory is within the prediction's error ({_error(device)}); only a "
        "trial on the device can tell."
    )


def _error(device: DeviceLimits) -> str:
    """``+-3%``, or ``-3% to +7%``."""
    below, above = (f"{100 * share:.3g}%" for share in (device.band, device.band_above))
    return f"+-{below}" if below == above else f"-{below} to +{above}"
