"""What the pages of docs/results say, by the numbers in their tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
EXAMPLE_FILES = ROOT / "tests" / "data" / "example_files.json"
"""How the plan of each of Axolotl's example files ended, by ``tests/helpers/example_files.py``."""


def text_of(page: Path) -> str:
    """The words of a page on one line, without its blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE).split())


def kinds_of_training() -> tuple[str, str]:
    """The kinds of training that were tried, and of these the planned ones, all of them to the byte."""
    found = json.loads((ROOT / "tests" / "data" / "trainer_kinds.json").read_text())
    planned = [peaks for peaks in found.values() if not isinstance(peaks, str)]
    assert all(with_few == whole for with_few, whole in planned)
    return str(len(found)), str(len(planned))


def example_files() -> tuple[str, str]:
    """How many of them are planned, and how many there are."""
    outcomes = [*json.loads(EXAMPLE_FILES.read_text()).values()]
    return str(outcomes.count("planned")), str(len(outcomes))


def blocks(page: str, begin: str) -> list[str]:
    """The fenced blocks of a page of results whose text has ``begin``."""
    found = re.findall(r"^```\n(.*?)^```", (RESULTS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in found if begin in block]


def column(block: str, row: str, place: int) -> str:
    """A number in the row of a block that begins so; the first after the name has place 0."""
    line = next(line for line in block.splitlines() if line.startswith(row))
    return line.removeprefix(row).split()[place]


def trials(way: str) -> str:
    return column(blocks("search_cost.md", "power_of_two")[0], way, 1)


def failed(way: str) -> str:
    return column(blocks("search_cost.md", "power_of_two")[0], way, 2)


def throughput() -> list[float]:
    """Medians of torchtune's recipes / ours, of all runs of recipes with recovery on."""
    runs = blocks("step_overhead.md", "ours, recovery ready")
    return [float(column(run, "ours, recovery ready", 1)) for run in runs]


def with_ddp(place: int) -> str:
    """A number of a step with one micro-batch; plain DDP's come first, and a slash between."""
    return column(
        blocks("ddp_overhead.md", "collectives")[0].partition("collectives")[2], ONE, place
    )


def time_with_ddp() -> list[str]:
    """The median and quartiles of ours to plain DDP."""
    return [column(blocks("ddp_overhead.md", "quartiles")[0], ONE, place) for place in range(3)]


def of_trainers(place: int, larger: bool = False) -> list[str]:
    """A number of each way: behind the counts of plain and ours, and a slash between; of the larger model,
    behind no counts."""
    [table] = blocks("trainer_overhead.md", "on the host")
    if larger:
        table = table.partition("the same, a Llama of 11 million")[2]
    ways = ("1 process ", "DDP ", "FSDP2 ", "FSDP2, in the last")
    return [column(table, way, place) for way in ways]


def dropout_by_sample() -> list[str]:
    """The least and the most time of a dropout layer, as a multiple of torch's, and that in a LoRA layer."""
    [table] = blocks("dropout.md", "sample / torch")
    ratios = re.findall(r"^(\w+), .*float\d\d +[\d.]+ +([\d.]+)", table, re.MULTILINE)
    alone = [ratio for layer, ratio in ratios if layer == "dropout"]
    return [min(alone), max(alone), *{ratio for layer, ratio in ratios if layer == "LoRA"}]


def with_fewer_layers() -> list[str]:
    [table] = blocks("layers_checkpointed.md", "of all layers")
    return [
        column(table, f"{share} of all layers", 5) for share in ("0.25", "0.50", "0.75", "1.00")
    ]


ONE = "1 micro-batch "
SAVES = ("gathered ", "sharded ", "in the background ")
OF_70B = 2 * 70_553_706_496 / 1e9
"""The weights of Llama 3.1 70B in bf16, in GB."""


def gain(lengths: str, way: str) -> float:
    return float(column(blocks("token_budget.md", f"; {lengths},")[0], way, 3))


def table(page: str, row: str) -> list[str]:
    """The cells of the row of a table that begins so."""
    line = next(
        line for line in (RESULTS / page).read_text().splitlines() if line.startswith(f"| {row} |")
    )
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


def said(page: str, pattern: str) -> tuple[str, ...]:
    """What a page of results says in words."""
    found = re.search(pattern, text_of(RESULTS / page))
    assert found, pattern
    return found.groups()


def percent(share: float) -> str:
    return f"{100 * abs(share):.0f}"


def update_after_beta2(step: int) -> str:
    """Adam's update where beta2 becomes beta2^4 after so many steps, as a multiple of what it should be, with
    a constant gradient."""
    before, after = 0.999, 0.999**4
    average = after * (1 - before**step) + (1 - after)
    return f"{((1 - after ** (step + 1)) / average) ** 0.5:.2f}"


def on_a_gpu(heading: str) -> list[list[str]]:
    """The rows of a table of numbers that were measured on a GPU, by cell."""
    section = (RESULTS / "h200.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def errors_on_a_gpu() -> list[str]:
    """The largest errors of predicted peaks, of allocated and of reserved memory, in percent."""
    text = "\n".join(" | ".join(row) for row in on_a_gpu("Memory, predicted and measured"))
    errors = re.findall(r"([\d.]+) % \| [^|]+ \| [+-]?([\d.]+) %", text)
    assert len(errors) == 16
    return [max(each, key=float) for each in zip(*errors, strict=True)]


def largest_on_a_gpu() -> list[str]:
    """Predicted largest micro-batches, and how many of them were found."""
    rows = on_a_gpu("Memory, predicted and measured")
    pairs = [re.fullmatch(r"(\d+), (\d+)", row[-1]) for row in rows]
    found = [pair[1] == pair[2] for pair in pairs if pair is not None]
    return [str(len(found)), str(sum(found))]


def speeds_on_a_gpu() -> list[str]:
    """The least and the largest ratio of predicted to measured speed."""
    ratios = [row[-1] for row in on_a_gpu("Speed, predicted and measured")]
    return [min(ratios, key=float), max(ratios, key=float)]


def rollout_gain() -> float:
    block = blocks("rollout_budget.md", "both ")[0].partition("\nboth")[2]
    return float(column(block, "  budget", 1))


def calls_added() -> int:
    """Calls that our step makes beyond a plain one, with one rank and one micro-batch: the newest."""
    plain, ours = re.findall(
        r"1 rank, 1 micro-batch +(\d+) / (\d+)", (RESULTS / "host_overhead.md").read_text()
    )[0]
    return int(ours) - int(plain)
