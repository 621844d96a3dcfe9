"""The lines of the product: a package that grows says what for, and its number falls with what is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchtune_adaptive"
SUFFIXES = {".py", ".js", ".css", ".html"}
SLACK = 20
"""Lines that a package may be smaller than its number, so that not each line that is deleted changes it."""

LINES = {
    "cli": 4809,
    "common": 1712,
    "core": 8722,
    "integrations": 5083,
    "library": 2734,
    "planner": 7581,
    "recipe": 21227,
    "recipes": 288,
    "torchtune_adaptive": 272,
}
"""The lines of each package. To raise a number, leave it, and add to ``GROWN``."""

GROWN: list[tuple[str, int, str]] = [
    ("planner", 81, "most scripts of TRL, and LLaMA-Factory with weights of few bits, are planned"),
    ("core", 5, "models of images and text train: their hooks are not installed twice"),
    ("integrations", 9, "the longest of structured texts is that with most characters"),
    (
        "integrations",
        189,
        "what transformers' examples and sentence-transformers train, and others' commands",
    ),
    (
        "common",
        64,
        "one table of versions, and lines that are seen where a script configures logging",
    ),
    (
        "common",
        401,
        "errors of closing a file are seen, folders and locks are the user's own, YAML of others is bounded",
    ),
    ("cli", 22, "the server of ranks and config.json run no code; a GPU that hangs is left out"),
    ("integrations", 184, "trainers resume from the newest whole checkpoint"),
    ("library", 5, "a model's config names no code of the Hub"),
    (
        "recipe",
        188,
        "sharded checkpoints are data, a save in the background is finished, secrets stay out of files",
    ),
    (
        "recipe",
        18,
        "what could not be saved is deleted before a launcher ends the ranks; one Ctrl-C is never two",
    ),
    ("cli", 338, "plans of a program of one's own, by its command line"),
    (
        "planner",
        3953,
        "programs run on a device that is not there, in the place of what described their trainers",
    ),
    (
        "planner",
        941,
        "trainers by settings, files of others, generation and vLLM are programs; plans are remembered",
    ),
    (
        "planner",
        132,
        "files of Axolotl: images, packed rows, wandb, adapters that FSDP2 shards",
    ),
    (
        "planner",
        54,
        "models that transformers splits over ranks, and programs that name layers, are planned",
    ),
    (
        "planner",
        173,
        "flex attention, flat parameters, and parameters and optimizers on the host are planned",
    ),
    ("library", 1, "teachers are a setting"),
    ("torchtune_adaptive", 3, "when a schedule of one's own counts is said"),
]
"""A package, the lines that it has gained since its number was set, and what users have of them."""


def counted() -> dict[str, int]:
    """The lines of each package, of the modules beside them, and of the recipes, as ``wc -l`` counts them."""
    found: dict[str, int] = {}
    for path in [*PACKAGE.rglob("*"), *(ROOT / "recipes").rglob("*")]:
        if path.suffix in SUFFIXES and not path.is_symlink():
            beside = path.is_relative_to(PACKAGE)
            parts = path.relative_to(PACKAGE).parts if beside else ("recipes", path.name)
            name = parts[0] if len(parts) > 1 else PACKAGE.name
            found[name] = found.get(name, 0) + path.read_bytes().count(b"\n")
    return found


def complaint(name: str, lines: int) -> str:
    """What to write where a package has not as many lines as its number says; empty if it has."""
    if name not in LINES:
        return f'{name} is new: write in LINES\n    "{name}": {lines},'
    grown = sum(more for package, more, _ in GROWN if package == name)
    over = lines - LINES[name] - grown
    if over > 0:
        return (
            f"{name} has {lines} lines, {over} more than its number: delete as many, or add to GROWN\n"
            f'    ("{name}", {over}, "what users have of them"),'
        )
    if over < -SLACK:
        return f'{name} has {lines} lines, {-over} fewer: write in LINES\n    "{name}": {lines - grown},'
    return ""


def test_no_package_is_larger_or_much_smaller_than_its_number() -> None:
    found = counted()
    wrong = [text for name, lines in sorted(found.items()) if (text := complaint(name, lines))]
    wrong += [f"{name} is gone: delete its line in LINES" for name in LINES.keys() - found.keys()]
    assert not wrong, "\n".join(["", *wrong])


def test_growth_says_what_for() -> None:
    for package, more, reason in GROWN:
        assert package in LINES and more > 0
        assert len(reason.split()) >= 4, f"{package}, {more} lines: {reason!r} says too little"


def test_each_way_of_being_wrong_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINES, "cli", 100)
    monkeypatch.setattr(f"{__name__}.GROWN", [("cli", 30, "a page of what fits")])
    assert complaint("cli", 130) == complaint("cli", 130 - SLACK) == ""
    assert '("cli", 1, "what users have of them"),' in complaint("cli", 131)
    assert '"cli": 79,' in complaint("cli", 129 - SLACK)
    assert '"new": 7,' in complaint("new", 7)
