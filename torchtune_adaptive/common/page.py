"""A page of HTML that needs nothing but itself: no script, no style sheet, no font from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222 }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top }
th { font-weight: 600 } thead th { border-bottom: 1px solid #bbb }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 13px }
svg { max-width: 100%; height: auto }
.failed { border-left: 4px solid #D55E00; padding: .4rem .8rem; background: #fdf3ee }
.failed pre { background: none; padding: 0; white-space: pre-wrap }
.note { color: #666 }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole page."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            '<link rel="icon" href="data:,">',  # or browsers look for one
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *body,
            "</body></html>\n",
        ]
    )


def section(title: str, *parts: str) -> str:
    """A heading and what follows it."""
    name = escape(title.lower().replace(" ", "-"))
    return "\n".join([f'<section id="{name}"><h2>{escape(title)}</h2>', *parts, "</section>"])


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def failure(text: str) -> str:
    """Why something failed; it may have several lines."""
    return f'<div class="failed"><pre>{escape(text)}</pre></div>'


def facts(values: Mapping[str, str]) -> str:
    """Names and values."""
    rows = (
        f"<tr><th>{escape(key)}</th><td>{escape(text)}</td></tr>" for key, text in values.items()
    )
    return "\n".join(["<table><tbody>", *rows, "</tbody></table>"])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = [row(cells, "td") for cells in rows]
    return "\n".join(
        ["<table><thead>", row(header, "th"), "</thead><tbody>", *body, "</tbody></table>"]
    )


def folded(title: str, text: str) -> str:
    """Long text that opens on a click."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
