"""A report as blocks, which become plain text, Markdown, or a page of HTML.

The page needs nothing but itself: no script, no style sheet, no font from elsewhere.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from string import Template
from textwrap import wrap
from typing import TYPE_CHECKING

from torchtune_adaptive.common.plots import as_svg
from torchtune_adaptive.common.text import printable, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 100
"""Columns of a terminal that text is wrapped to."""
# Without an icon of its own, browsers look for one. Figures have dark text, so they stay on white.
_PAGE = Template("""\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>$title</title><style>
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ccc; --soft: #f4f4f4 }
:root { --failed: #fdf3ee; --note: #666 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #17191c; --line: #444; --soft: #23262a }
  :root { --failed: #3a2117; --note: #999 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
body { margin: 1.5rem 0; padding: 0 max(1rem, 3vw) }
h1 { font-size: 1.5rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
table { display: block; max-width: 100%; overflow-x: auto }
th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top }
td { overflow-wrap: anywhere; min-width: 3rem }
th { font-weight: 600 } thead th { border-bottom: 1px solid var(--line) }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: 13px }
figure { margin: 0; padding: .5rem; background: #fff; border-radius: .3rem }
figure svg { display: block; margin: auto; width: 100%; max-width: 56rem; height: auto }
.gallery { display: grid; gap: 1rem }
.gallery { grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)) }
.failed { border-left: 4px solid #D55E00; padding: .4rem .8rem; background: var(--failed) }
.failed pre { background: none; padding: 0; white-space: pre-wrap }
.note { color: var(--note) }
</style></head><body>
<h1>$title</h1>
$body
</body></html>
""")


def as_text(blocks: Iterable[Block]) -> str:
    """Plain text of at most ``WIDTH`` columns, with an empty line after each block."""
    return printable("".join(f"{line}\n" for block in blocks for line in (*block.text(), "")))


def as_markdown(blocks: Iterable[Block]) -> str:
    """GitHub's Markdown, with an empty line after each block."""
    return printable("".join(f"{line}\n" for block in blocks for line in (*block.markdown(), "")))


def as_page(title: str, sections: Mapping[str, Iterable[Block]]) -> str:
    """A whole page of HTML, with the blocks of each section by its title."""
    lines = []
    for heading, blocks in sections.items():
        name = escape(heading.lower().replace(" ", "-"))
        lines.append(f'<section id="{name}"><h2>{escape(heading)}</h2>')
        lines += [line for block in blocks for line in block.html()]
        lines.append("</section>")
    return _PAGE.substitute(title=escape(title), body="\n".join(lines))


@dataclass(frozen=True)
class Paragraph:
    """Lines of text; the first of an important one is set in bold."""

    lines: Sequence[str]
    important: bool = False

    def text(self) -> list[str]:
        return [line for text in self.lines for line in _wrapped(text)]

    def markdown(self) -> list[str]:
        first, *others = self.lines
        return [f"**{first}**" if self.important else first, *(f"\n{line}" for line in others)]

    def html(self) -> list[str]:
        return [f"<p>{escape(line)}</p>" for line in self.lines]


@dataclass(frozen=True)
class Listing:
    """A title and items."""

    title: str
    items: Sequence[str]

    def text(self) -> list[str]:
        items = (line for item in self.items for line in _wrapped(item, "  ", "    "))
        return [f"{self.title}:", *items]

    def markdown(self) -> list[str]:
        return [f"{self.title}:", "", *(f"- {item}" for item in self.items)]

    def html(self) -> list[str]:
        items = (f"<li>{escape(item)}</li>" for item in self.items)
        return [f"<p>{escape(self.title)}:</p><ul>", *items, "</ul>"]


@dataclass(frozen=True)
class Table:
    """A table with a title; a first column without a name holds the names of the rows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    """The numbers of the columns that are aligned right."""
    commands: Sequence[str] = ()
    """The command to type for each row, if any: under the row as text, otherwise in a last column."""

    def text(self) -> list[str]:
        lines = _wrapped(f"{self.title}:") if self.title else []
        narrow = self._narrow()
        header, *rows = table(self.header, [row for _, row in narrow], self.right)
        lines.append(header)
        for number, row in enumerate(rows):
            lines.append(row)
            of = narrow[number][0]
            if self.commands and (number + 1 == len(rows) or narrow[number + 1][0] != of):
                lines += _command(self.commands[of])
        return lines

    def _narrow(self) -> list[tuple[int, Sequence[str]]]:
        """The rows, each with its number; where the table is too wide, a row whose first cell is long
        continues below."""
        numbered = list(enumerate(self.rows))
        longest = max((len(row[0]) for row in self.rows), default=0)
        too_wide = max(map(len, table(self.header, self.rows, self.right))) - WIDTH
        if too_wide <= 0:
            return numbered
        found: list[tuple[int, Sequence[str]]] = []
        for number, (cell, *others) in numbered:
            width = max(20, longest - too_wide)
            lines = wrap(cell, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
            found.append((number, (lines[0], *others)))
            found += [(number, (line, *("" for _ in others))) for line in lines[1:]]
        return found

    def markdown(self) -> list[str]:
        header, *rows = self._with_commands("`{}`")
        rules = ["--:" if column in self.right else "---" for column in range(len(header))]
        lines = [f"{self.title}:", ""] if self.title else []
        return [*lines, *(_markdown_row(row) for row in (header, rules, *rows))]

    def html(self) -> list[str]:
        header, *rows = self._with_commands("{}")
        title = [f"<p>{escape(self.title)}:</p>"] if self.title else []
        head = ["<thead>", _html_row(header, len(header)), "</thead>"] if any(header) else []
        body = [_html_row(row, 0 if header[0] else 1) for row in rows]
        return [*title, "<table>", *head, "<tbody>", *body, "</tbody></table>"]

    def _with_commands(self, shown: str) -> list[list[str]]:
        """The header and the rows, with the commands in a last column if there are any."""
        if not any(self.commands):
            return [list(self.header), *map(list, self.rows)]
        commands = [shown.format(command) if command else "" for command in self.commands]
        rows = ([*row, command] for row, command in zip(self.rows, commands, strict=True))
        return [[*self.header, "to use it"], *rows]


@dataclass(frozen=True)
class Verbatim:
    """Text whose lines stay as they are."""

    content: str
    title: str = ""
    """The title of the text; as HTML, it opens on a click."""
    failed: bool = False
    """Whether it says why something failed."""

    def text(self) -> list[str]:
        title = [f"{self.title}:", ""] if self.title else []
        return [*title, *(f"    {line}" for line in self.content.splitlines())]

    markdown = text

    def html(self) -> list[str]:
        content = f"<pre>{escape(self.content)}</pre>"
        if self.title:
            return [f"<details><summary>{escape(self.title)}</summary>{content}</details>"]
        return [f'<div class="failed">{content}</div>' if self.failed else content]


@dataclass(frozen=True)
class Drawing:
    """A figure, which only HTML shows."""

    figure: Figure | None

    def text(self) -> list[str]:
        return []

    markdown = text

    def html(self) -> list[str]:
        return _figure(self.figure) if self.figure else _no_figure()


@dataclass(frozen=True)
class Gallery:
    """Figures beside each other, as many as there is room for, which only HTML shows."""

    figures: Sequence[Figure]

    def text(self) -> list[str]:
        return []

    markdown = text

    def html(self) -> list[str]:
        if not self.figures:
            return _no_figure()
        figures = (line for figure in self.figures for line in _figure(figure))
        return ['<div class="gallery">', *figures, "</div>"]


def _figure(figure: Figure) -> list[str]:
    return ["<figure>", as_svg(figure), "</figure>"]


def _no_figure() -> list[str]:
    why = "matplotlib is not installed (pip install matplotlib)"
    if find_spec("matplotlib"):
        why = "there are too few steps"
    return [f'<p class="note">{escape(f"There is no plot: {why}.")}</p>']


Block = Paragraph | Listing | Table | Verbatim | Drawing | Gallery


def _wrapped(text: str, first: str = "", others: str = "  ") -> list[str]:
    return wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _command(command: str) -> list[str]:
    """The lines of a command, which can be pasted together."""
    if not command:
        return []
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + len(word) + 9 > WIDTH:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return [f"      {line}" for line in (*(f"{one} \\" for one in lines[:-1]), lines[-1])]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _html_row(cells: Sequence[str], names: int) -> str:
    """A row, whose first cells are the names of what stands below or beside them."""
    tags = ["th"] * names + ["td"] * (len(cells) - names)
    row = (f"<{tag}>{escape(cell)}</{tag}>" for tag, cell in zip(tags, cells, strict=True))
    return f"<tr>{''.join(row)}</tr>"
