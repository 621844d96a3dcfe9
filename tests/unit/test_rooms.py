"""The rooms of the package: imports point one way, down, and the ground floor needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import torchtune_adaptive

PACKAGE = Path(torchtune_adaptive.__file__).parent
FLOORS = {
    "errors": 0,
    "search": 0,
    "recovery": 0,
    "schedule": 0,
    "versions": 0,
    "config": 0,
    "config_checks": 0,
    "noise": 0,
    "packing": 0,
    "allocator": 0,
    "gpus": 0,
    "remembered": 0,
    "forecast": 0,
    "memory": 1,
    "fsdp": 1,
    "snapshot": 2,
    "consensus": 2,
    "step": 2,
    "small_batches": 2,
    "watchdog": 2,
    "tiny": 3,
    "sampler": 3,
    "rows": 3,
    "probe": 3,
    "result_cache": 3,
    "report": 3,
    "build": 3,
    "imagined": 3,
    "recorder": 3,
    "trace": 3,
    "traced_run": 3,
    "self_check": 3,
    "answers": 3,
    "plan": 3,
    "what_if": 3,
    "plan_report": 3,
    "planning": 4,
    "checkpoints": 3,
    "find": 3,
    "calibration": 3,
    "prediction": 3,
    "growth": 3,
    "lengths": 3,
    "token_budget": 3,
    "budget_report": 3,
    "learning_rate": 3,
    "instruments": 3,
    "loop": 3,
    "run": 3,
    "registry": 3,
    "launch": 4,
    "cli": 4,
}
RECIPES = PACKAGE.parent / "recipes"


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "torchtune_adaptive":
            rooms.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "torchtune_adaptive."
        ):
            rooms.add((node.module or "").split(".")[1])
    return rooms


def test_every_room_is_on_a_floor() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} == set(FLOORS)


def test_imports_point_down_and_never_in_a_circle() -> None:
    below: dict[str, set[str]] = {}
    for room, floor in FLOORS.items():
        below[room] = imported_rooms(PACKAGE / f"{room}.py")
        for other in below[room]:
            assert FLOORS[other] <= floor, (
                f"{room} (floor {floor}) imports {other} (floor {FLOORS[other]})"
            )
    settled: set[str] = set()
    while len(settled) < len(below):
        ready = {room for room, others in below.items() if others <= settled} - settled
        assert ready, f"a circle among {sorted(set(below) - settled)}"
        settled |= ready


def test_nothing_in_the_package_imports_a_recipe() -> None:
    recipes = {path.stem for path in RECIPES.glob("*.py")}
    for path in PACKAGE.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not names & recipes


def test_the_ground_floor_needs_no_torch() -> None:
    rooms = [room for room, floor in FLOORS.items() if floor == 0]
    program = "import sys\n" + "".join(f"import torchtune_adaptive.{room}\n" for room in rooms)
    program += "assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_accelerators_are_named_in_one_room() -> None:
    for path in [*PACKAGE.glob("*.py"), *RECIPES.glob("*.py")]:
        if path.stem == "memory":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("cuda", "xpu", "mps"):
                raise AssertionError(f"{path.name}:{node.lineno} names an accelerator")
