"""What ``plan`` is told about the machine, and what it says about it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from torchtune_adaptive.cli.machine_options import bandwidth, machine_told
from torchtune_adaptive.cli.plan_options import _gpus, add_arguments, parsed, plan_command
from torchtune_adaptive.cli.speed_report import machine_as_dict
from torchtune_adaptive.common.errors import ConfigError
from torchtune_adaptive.planner.speed.machine import Machine
from torchtune_adaptive.recipe.plan.calibration import Calibrations, SpeedCalibration
from torchtune_adaptive.recipe.plan.request import PlanRequest, on_devices, plan_request
from torchtune_adaptive.recipe.registry import load_config, with_overrides


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parsed(parser, ["llama3_1/8B_full", *words])


def told(*words: str) -> tuple[str | None, tuple[int, int] | None, Machine]:
    return machine_told(arguments(*words))


def test_options() -> None:
    machine = Machine(power=500.0, links="pcie3", gpus_in_a_node=4)
    words = ("--gpu", "h100", "--nodes", "2x4", "--power", "500W", "--links", "PCIe3")
    assert told(*words) == ("h100", (2, 4), machine)
    assert told("--links", "300GB/s") == (None, None, Machine(links=300e9))
    assert not told()[-1].is_told


def test_a_file_has_the_same_words_and_options_go_before_it(tmp_path: Path) -> None:
    file = tmp_path / "box.yaml"
    file.write_text("gpu: 4090\nnodes: 2x4\npower: 350\nnetwork: 25Gb/s\nlinks:\n")
    machine = Machine(power=400.0, network=25e9 / 8, gpus_in_a_node=4)
    assert told("--machine", str(file), "--power", "400W") == ("4090", (2, 4), machine)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200Gb/s", 25e9),
        ("200 Gbps", 25e9),
        ("200Gbit/s", 25e9),
        ("25GB/s", 25e9),
        ("8x400Gb/s", 400e9),
        ("3.2Tb/s", 400e9),
    ],
)
def test_bandwidths(text: str, expected: float) -> None:
    assert bandwidth("network", text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--network", "200G"], "Write a bandwidth: 200Gb/s in bits, 25GB/s in bytes"),
        (["--network", "0Gb/s"], "is not a bandwidth"),
        (["--links", "pcie7"], "Write one of nvlink, pcie3, pcie4, pcie5, or a bandwidth"),
        (["--power", "much"], "power: 'much' is not a power"),
        (["--power", "0W"], "is not a power"),
        (["--nodes", "2"], "Write the number of nodes and of GPUs in each, e.g. 2x8"),
        (["--machine", "/nowhere.yaml"], "--machine: '/nowhere.yaml' cannot be read"),
        (["--nodes", "2x8", "--nproc", "8"], "--nproc: 8 GPUs contradict the 16 of --nodes"),
        (["--nodes", "2x8", "--gpu", "8xh100"], "--nodes: 16 GPUs contradict the 8 of --gpu"),
        (["--gpu", "h100", "--power", "50W"], "is less than 30% of the 700 W"),
        (
            ["device=cpu", "--memory", "1GiB", "--power", "50W"],
            "is simulated, and a machine of GPUs",
        ),
    ],
)
def test_what_is_not_understood(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command(arguments(*words)) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("text", ["color: red", "- gpu", "gpu: ["])
def test_a_file_that_is_not_understood(text: str, tmp_path: Path) -> None:
    file = tmp_path / "box.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--machine") as refused:
        told("--machine", str(file))
    assert "\n" not in str(refused.value)


def test_nodes_are_the_number_of_gpus() -> None:
    assert _gpus(None, "h100", (2, 8)) == _gpus(16, "h100", (2, 8)) == (16, "h100")
    assert _gpus(None, "16xh100", (2, 8)) == (16, "h100")


def planned(machine: Machine, *overrides: str) -> PlanRequest:
    cfg = with_overrides(load_config("llama3_1/8B_full"), overrides)
    return plan_request(cfg, 16, "h100", machine=machine)


def test_a_plan_has_the_machine_and_says_what_is_assumed() -> None:
    plan = planned(Machine(power=500.0, network=50e9, gpus_in_a_node=4))
    assert plan.pace is not None and plan.pace.speeds.gpus_in_a_node == 4
    said = "\n".join(plan.assumptions)
    for words in ("power: 500 W of 700 W", "links: 340 GB/s", "nodes: 4 of 4", "network: 45 GB/s"):
        assert words in said
    about = machine_as_dict(plan)
    assert about is not None and (about["gpu"], about["power_watts"]) == ("h100-80gb", 500.0)
    assert about["told"] == {"power": 500.0, "network": 50e9, "gpus_in_a_node": 4}
    assert machine_as_dict(replace(plan, pace=None)) is None


def test_gpus_that_are_compared_have_their_own_power_and_links() -> None:
    plan = planned(Machine(power=500.0, gpus_in_a_node=4))
    (_, same), (_, other) = on_devices(plan, "h100,a100-80")
    assert same is not None and other is not None
    assert (same.speeds.power, other.speeds.power) == (500.0, 400.0)
    assert same.speeds.gpus_in_a_node == other.speeds.gpus_in_a_node == 4


def test_a_measurement_is_of_the_machine_as_it_is(tmp_path: Path) -> None:
    cache = f"adaptive_batching.cache={tmp_path}"
    plan = planned(Machine(), cache)
    kept = Calibrations(SpeedCalibration, plan.asked, 16)
    kept.keep(SpeedCalibration("h100-80gb", 1.25, 1e9))
    measured, with_less_power = planned(Machine(), cache), planned(Machine(power=500.0), cache)
    assert measured.pace is not None and with_less_power.pace is not None
    assert (measured.pace.correction, with_less_power.pace.correction) == (1.25, None)
