"""The same blocks in every format; how text is wrapped and tables are narrowed is in test_plan_report."""

from __future__ import annotations

import pytest

from torchtune_adaptive.common import document
from torchtune_adaptive.common.document import (
    Block,
    Drawing,
    Listing,
    Paragraph,
    Table,
    Verbatim,
    as_markdown,
    as_page,
    as_text,
)

BLOCKS: list[Block] = [
    Paragraph(["It <fits>.", "Just so."], important=True),
    Listing("Changes", ["a -> b"]),
    Table("Sizes", ("rows", "peak"), [("1", "2 GiB"), ("2", "3|4")], {1}, ["", "batch_size=2"]),
    Table("", ("", ""), [("state", "finished")]),
    Verbatim("key:\n  x: 1", "config"),
    Drawing(None),
]


def test_text() -> None:
    assert [line for line in as_text(BLOCKS).splitlines() if line.strip()] == [
        *("It <fits>.", "Just so.", "Changes:", "  a -> b", "Sizes:", "  rows   peak"),
        *("  1     2 GiB", "  2       3|4", "      batch_size=2", "  state  finished"),
        *("config:", "    key:", "      x: 1"),
    ]


def test_markdown() -> None:
    assert [line for line in as_markdown(BLOCKS).splitlines() if line.strip()] == [
        *("**It <fits>.**", "Just so.", "Changes:", "- a -> b", "Sizes:"),
        *("| rows | peak | to use it |", "| --- | --: | --- |", "| 1 | 2 GiB |  |"),
        r"| 2 | 3\|4 | `batch_size=2` |",
        *("|  |  |", "| --- | --- |", "| state | finished |"),
        *("config:", "    key:", "      x: 1"),
    ]


def test_where_matplotlib_is_missing_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "find_spec", lambda name: None)
    assert "no plot: matplotlib is not installed (pip install" in as_page("A run", {"": BLOCKS})


def test_html() -> None:
    html = as_page("A run", {"What was found": BLOCKS})
    for part in (
        *("<h1>A run</h1>", '<section id="what-was-found"><h2>What was found</h2>'),
        *("<p>It &lt;fits&gt;.</p>\n<p>Just so.</p>", "<p>Changes:</p><ul>\n<li>a -&gt; b</li>"),
        "<thead>\n<tr><th>rows</th><th>peak</th><th>to use it</th></tr>\n</thead>",
        "<tr><td>2</td><td>3|4</td><td>batch_size=2</td></tr>",
        "<table>\n<tbody>\n<tr><th>state</th><td>finished</td></tr>",
        "<details><summary>config</summary><pre>key:\n  x: 1</pre></details>",
        '<p class="note">There is no plot: there are too few steps.</p>',
    ):
        assert part in html, part
