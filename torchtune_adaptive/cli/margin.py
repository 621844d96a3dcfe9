"""How sure a plan is of a predicted peak: in words, wherever one is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchtune_adaptive.common import human_bytes
from torchtune_adaptive.planner import DOES_NOT_FIT, DeviceLimits, Peak

AS_WRITTEN = (
    "What is compiled is predicted as if it were not, which takes more memory: this is an upper bound. It "
    "cannot be followed here: {}."
)


def worst(verdicts: Sequence[str]) -> str:
    """The worst of some verdicts."""
    return next(v for v in (DOES_NOT_FIT, "UNCERTAIN", "FITS") if v in verdicts)


def peak_of(device: DeviceLimits, reserved: int) -> str:
    """``20.5 GiB (+-3%) of 21.9 GiB``: a predicted peak, its error, and the usable memory."""
    return f"{human_bytes(reserved)} ({_error(device)}) of {human_bytes(device.usable_bytes)}"


def cautions(device: DeviceLimits, peaks: Iterable[tuple[str, Peak]], where: str) -> list[str]:
    """The lines about those of the peaks that only a trial can tell about, each with its name, after
    ``where``."""
    by_error, by_retries = dict[str, None](), dict[str, None]()
    for name, peak in peaks:
        if peak.verdict(device) == "UNCERTAIN":
            (by_retries if peak.with_retries else by_error)[name] = None
    lines = []
    if by_error:
        lines.append(caution(device, f"{where} {' and '.join(by_error)}"))
    if by_retries:
        lines.append(caution_of_retries(f"{where} {' and '.join(by_retries)}"))
    return lines


def caution(device: DeviceLimits, where: str) -> str:
    """The line about a peak that is so near the usable memory that the prediction's error decides."""
    return (
        f"Caution: {where} the usable memory is within the prediction's error ({_error(device)}); only a "
        "trial on the device can tell."
    )


def caution_of_retries(where: str) -> str:
    """The line about a peak that is above the usable memory by what the allocator can return."""
    return (
        f"Caution: {where} a step runs only if torch's allocator returns memory in the middle of it and "
        "requests it again (allocation retries), which takes time. A search takes that for too much."
    )


def _error(device: DeviceLimits) -> str:
    """``+-3%``, or ``-3% to +7%``."""
    below, above = (f"{100 * share:.3g}%" for share in (device.band, device.band_above))
    return f"+-{below}" if below == above else f"-{below} to +{above}"
