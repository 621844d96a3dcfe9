"""Figures, where matplotlib is installed, all in one style."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtune_adaptive.common.durable import atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
"""Colors that people with color vision deficiencies can tell apart (Okabe and Ito)."""
GRAY = "#777777"
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, "#56B4E9", "#F0E442", "#332288", GRAY)
"""Colors for more series than that; no two are alike."""


def new_figure(width: float, height: float) -> Figure | None:
    """An empty figure (size in inches) that needs no display; None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Any) -> None:
    """No box, a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)


def whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers only, with thousands grouped: there are no half rows."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def memory_unit(most: int) -> tuple[str, int]:
    """The unit in which an axis up to ``most`` bytes is read best, and its size."""
    return ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20)


def legend_below(figure: Figure, columns: int = 4, lines: Sequence[Any] | None = None) -> None:
    """One legend for all axes, or for some lines in them, outside of them, where it covers no data."""
    handles: dict[str, Any] = {}
    if lines is not None:
        handles = {line.get_label(): line for line in lines}
    for axes in figure.axes if lines is None else ():
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        frameon=False,
        fontsize="small",
    )


def legend_beside(axes: Any) -> None:
    """The legend of one of several axes, to the right of it."""
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize="small")


def save(figure: Figure, path: Path) -> Path:
    with atomically(path, flush=False) as temporary:
        figure.savefig(temporary, dpi=120)
    return path


def as_svg(figure: Figure) -> str:
    """The figure as an SVG element for a page of HTML, whose text stays text."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    found = written.getvalue()
    return found[found.index("<svg") :]
