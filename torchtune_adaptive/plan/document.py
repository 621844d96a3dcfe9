"""A report as blocks, which can be printed as plain text or as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torchtune_adaptive.text import table


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
    """Plain text, with an empty line after each block."""
    return "".join(f"{line}\n" for block in blocks for line in (*_text_lines(block), ""))


def _text_lines(block: Block) -> list[str]:
    if isinstance(block, Paragraph):
        return list(block.lines)
    if isinstance(block, Listing):
        return [f"{block.title}:", *(f"  {item}" for item in block.items)]
    header, *rows = table(block.header, block.rows, block.right)
    commands = block.commands or [""] * len(rows)
    lines = [f"{block.title}:"] if block.title else []
    lines.append(header)
    for row, command in zip(rows, commands, strict=True):
        lines += [row, f"      {command}"] if command else [row]
    return lines


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
