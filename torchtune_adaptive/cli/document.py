"""A report as blocks, which can be printed as plain text or as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from torchtune_adaptive.common import table

WIDTH = 100
"""Columns of a terminal that text is wrapped to."""


@dataclass(frozen=True)
class Paragraph:
    """Lines of text; the first of an important one is set in bold."""

    lines: Sequence[str]
    important: bool = False


@dataclass(frozen=True)
class Listing:
    """A title and items."""

    title: str
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table with a title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    """The numbers of the columns that are aligned right."""
    commands: Sequence[str] = field(default=())
    """What to type for each row, if anything: under the row as text, in a last column as Markdown."""


Block = Paragraph | Listing | Table


def as_text(blocks: Iterable[Block]) -> str:
    """Plain text of at most ``WIDTH`` columns, with an empty line after each block."""
    return "".join(f"{line}\n" for block in blocks for line in (*_text_lines(block), ""))


def _text_lines(block: Block) -> list[str]:
    if isinstance(block, Paragraph):
        return [line for text in block.lines for line in _wrapped(text)]
    if isinstance(block, Listing):
        items = (line for item in block.items for line in _wrapped(item, "  ", "    "))
        return [f"{block.title}:", *items]
    lines = _wrapped(f"{block.title}:") if block.title else []
    narrow = _narrow(block)
    header, *rows = table(block.header, [row for _, row in narrow], block.right)
    lines.append(header)
    for number, row in enumerate(rows):
        lines.append(row)
        of = narrow[number][0]
        if block.commands and (number + 1 == len(rows) or narrow[number + 1][0] != of):
            lines += _command(block.commands[of])
    return lines


def _wrapped(text: str, first: str = "", others: str = "  ") -> list[str]:
    return wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _narrow(block: Table) -> list[tuple[int, Sequence[str]]]:
    """The rows of a table, each with its number; where the table is too wide, a row whose first cell is long
    continues below."""
    numbered = list(enumerate(block.rows))
    longest = max((len(row[0]) for row in block.rows), default=0)
    too_wide = max(map(len, table(block.header, block.rows, block.right))) - WIDTH
    if too_wide <= 0:
        return numbered
    found: list[tuple[int, Sequence[str]]] = []
    for number, (cell, *others) in numbered:
        width = max(20, longest - too_wide)
        lines = wrap(cell, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
        found.append((number, (lines[0], *others)))
        found += [(number, (line, *("" for _ in others))) for line in lines[1:]]
    return found


def _command(command: str) -> list[str]:
    """What to type, so that it can be pasted from several lines as well."""
    if not command:
        return []
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + len(word) + 9 > WIDTH:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return [f"      {line}" for line in (*(f"{one} \\" for one in lines[:-1]), lines[-1])]


def as_markdown(blocks: Iterable[Block]) -> str:
    """GitHub's Markdown, with an empty line after each block."""
    return "".join(f"{line}\n" for block in blocks for line in (*_markdown_lines(block), ""))


def _markdown_lines(block: Block) -> list[str]:
    if isinstance(block, Paragraph):
        first, *others = block.lines
        return [f"**{first}**" if block.important else first, *(f"\n{line}" for line in others)]
    if isinstance(block, Listing):
        return [f"{block.title}:", "", *(f"- {item}" for item in block.items)]
    header, rows = list(block.header), [list(row) for row in block.rows]
    if any(block.commands):
        header.append("to use it")
        rows = [
            [*row, f"`{command}`" if command else ""]
            for row, command in zip(rows, block.commands, strict=True)
        ]
    rules = ["--:" if column in block.right else "---" for column in range(len(header))]
    lines = [f"{block.title}:", ""] if block.title else []
    return [*lines, *(_markdown_row(row) for row in (header, rules, *rows))]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
