"""The docs agree with the repository: links, pictures, the map, versions."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import torchtune_adaptive

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchtune_adaptive"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TARGET = re.compile(r'\]\(([^)\s]+)\)|src="([^"]+)"')


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in ("".join(match) for match in TARGET.findall(page.read_text())):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in headings(found), target


def test_the_readme_leads_to_every_page() -> None:
    linked = {
        "".join(match).split("#")[0] for match in TARGET.findall((ROOT / "README.md").read_text())
    }
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    assert pages <= linked


def test_pictures_are_small() -> None:
    pictures = list(ROOT.glob("docs/images/*"))
    assert pictures and all(picture.stat().st_size < 60_000 for picture in pictures)


def test_the_map_lists_every_folder_and_module() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    block = page[page.index("    torchtune_adaptive/\n") :].partition("\n\n")[0]
    listed = re.findall(r"(?<=[ ,])(\w+(?:/|\.py))", block.partition("\n")[2])
    places = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    places |= {f"{path.parent.name}/" for path in PACKAGE.glob("*/**/__init__.py")}
    assert {*listed} == places


def test_the_changelog_has_the_current_version_and_a_place_for_the_next() -> None:
    headlines = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headlines[:2] == ["Unreleased", torchtune_adaptive.__version__]
    assert version("torchtune-adaptive") == torchtune_adaptive.__version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == torchtune_adaptive.__version__
