"""The command: what it says, its exit status, and that it leaves the process that asks alone."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.errors import ConfigError, NoPrediction
from torchtune_adaptive.memory_model.gpus import GPUS, gpu
from torchtune_adaptive.plan.calibration import Calibration, Calibrations
from torchtune_adaptive.plan.command import add_arguments, plan_command
from torchtune_adaptive.plan.request import plan_request
from torchtune_adaptive.plan.what_if import what_ifs
from torchtune_adaptive.registry import find_config

PROGRAM = """
import sys, torch
from torch import distributed
from torchtune_adaptive.cli import main

if __name__ == "__main__":
    before = torch._C._get_privateuse1_backend_name(), torch.UntypedStorage.resize_
    try:
        main()
    finally:
        assert before == (torch._C._get_privateuse1_backend_name(), torch.UntypedStorage.resize_)
        assert not distributed.is_initialized() and not hasattr(torch, "imagined")
"""


def run_plan(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "asking.py"  # a file: processes are made by importing it again
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_a_plan_for_the_simulated_device(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    done = run_plan("--config", "tiny/full", "--nproc", "2", "--json", "--no-what-ifs",
                    "--plot", str(picture), "adaptive_batching.probe_length=103",
                    folder=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["verdict"] == "FITS"
    assert said["largest"] == 14  # what the searches find without rounding
    assert said["configured"]["parts"].keys() >= {"activations", "logits and loss", "parameters"}
    assert said["configured"]["phase"] in ("forward", "backward")
    assert not said["traced_directly"]
    assert picture.stat().st_size > 10_000


def test_all_that_may_be_asked(tmp_path: Path) -> None:
    done = run_plan("--config", "tiny/full", "--nproc", "3", "--json",
                    "adaptive_batching.probe_length=64", f"adaptive_batching.cache={tmp_path}",
                    folder=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    names = {one["name"]: one["answer"] for one in said["what_ifs"]}
    assert names.keys() >= {"activation checkpointing", "LoRA (rank 8)", "6 ranks", "1 rank"}
    assert names["activation checkpointing"]["largest"] > said["largest"]
    assert names["6 ranks"]["configured"]["live"] < said["configured"]["live"]
    # Parts as small as these stay as they are.
    assert names["8-bit optimizer (torchao)"]["configured"]["live"] == said["configured"]["live"]
    assert said["lengths"]["32"] >= 2 * said["largest"] >= 4 * said["lengths"]["128"]
    # 3 ranks cannot share 512 rows of an embedding evenly.
    assert said["last_rank"]["rank"] == 2
    assert said["last_rank"]["configured"]["live"] < said["configured"]["live"]


def test_what_does_not_fit_has_status_1(tmp_path: Path) -> None:
    done = run_plan("--config", "tiny/full", "--memory", "1MiB", "--no-what-ifs", "batch_size=1",
                    folder=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "batch_size 1: DOES NOT FIT" in done.stdout
    assert "Not even one row of 512 tokens fits." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--config", "tiny/ful"], "Did you mean tiny/full"),
        (["--config", "llama3_1/8B_full", "--gpu", "h10-80gb"], "Did you mean h100-80gb"),
        (["--config", "tiny/full", "adaptive_batching.memory_limit=null"], "has no memory of its"),
        (["--config", "tiny/full", "batch_size=0"], "an integer >= 1"),
        (["--config", "tiny/full", "batch_size"], "Write key=value"),
        (["--config", "tiny/full", "--memory", "lots"], "not an amount of memory"),
        (["--config", "tiny/full", "--nproc", "0"], "Use 1 or more"),
        ([], "Give the name of a config"),
    ],
)
def test_no_answer_has_status_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert plan_command(parser.parse_args(arguments)) == 2
    assert complaint in capsys.readouterr().err


def test_a_step_that_cannot_be_traced_has_status_2(tmp_path: Path) -> None:
    done = run_plan("--config", "tiny/full", "--no-what-ifs", "model.num_heads=3", folder=tmp_path)
    assert done.returncode == 2
    assert "NoPrediction: A step of this config could not be traced: ValueError" in done.stderr


def stock(name: str, **changes: Any) -> Any:
    return OmegaConf.merge(OmegaConf.load(find_config(name)), changes)


class TestWhatIsAssumed:
    def test_a_device_by_name(self) -> None:
        plan = plan_request(stock("llama3_1/8B_full"), 8, "a100-40gb")
        assert plan.device.usable == int(GPUS["a100-40gb"].usable(8) * 0.95)
        assert any("CUDA's context and NCCL" in line for line in plan.assumptions)

    def test_memory_is_what_a_process_can_get(self) -> None:
        plan = plan_request(stock("llama3_1/8B_full"), 8, memory=76 << 30)
        assert plan.device.usable == int((76 << 30) * 0.95)

    def test_this_machine_is_as_searches_found_it(self, tmp_path: Path) -> None:
        cfg = stock("llama3_1/8B_full", adaptive_batching={"cache": str(tmp_path)})
        with pytest.raises(ConfigError, match="none is remembered"):
            plan_request(cfg, 8, "here")
        compiled = OmegaConf.merge(cfg, {"compile": True})
        for device, when, run, ranks in (
            ("Old", 1e9, cfg, 8),
            ("New", 2e9, cfg, 8),
            ("One", 3e9, cfg, 1),
            ("Compiled", 4e9, compiled, 8),
        ):
            kept = Calibrations(str(tmp_path), run, ranks)
            kept.keep(Calibration(device, 20 << 30, 1.02, 1.01, when))
        plan = plan_request(cfg, 4, "here")
        assert (plan.device.name, plan.device.correction) == ("New", 1.02)
        assert plan.device.usable == int((20 << 30) * 0.95)
        assert "measured here on 2033-05-18: peaks were +2.00% (reserved)" in plan.assumptions[0]
        assert plan_request(cfg, 1, "here").device.name == "One"
        assert plan_request(compiled, 2, "here").device.name == "Compiled"
        absurd = Calibration("Absurd", 20 << 30, reserved=3.0, allocated=1.0, when=5e9)
        Calibrations(str(tmp_path), cfg, 8).keep(absurd)
        assert plan_request(cfg, 4, "here").device.name == "New"

    def test_the_allocator_is_that_of_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        assert plan_request(stock("llama3_1/8B_full"), 8).device.expandable

    def test_the_length_of_rows(self) -> None:
        assert plan_request(stock("llama3_1/8B_full"), 8).length_source.startswith("assumed")
        longer = stock("llama3_1/8B_full", tokenizer={"max_seq_len": 4096})
        assert plan_request(longer, 8).length == 4096

    def test_what_cannot_be_told_is_refused(self) -> None:
        changes = {
            "tensor_parallel_dim": 2,
            "tensor_parallel_plan": {},
            "optimizer": {"fused": False},
        }
        with pytest.raises(NoPrediction, match="are not traced yet"):
            plan_request(stock("llama3_1/8B_full", **changes), 8)

    def test_compiling_is_said_to_err_high(self) -> None:
        plan = plan_request(stock("llama3_1/8B_full", compile=True), 8)
        assert any("compile" in line and "errs high" in line for line in plan.assumptions)


def test_what_ifs_change_one_thing_each() -> None:
    plan = plan_request(stock("llama3_1/8B_full"), 8)
    changed = {one.name: one.question for one in what_ifs(plan)}
    assert changed["no activation checkpointing"].cfg["enable_activation_checkpointing"] is False
    assert changed["QLoRA (rank 8)"].cfg["model"]["_component_"].endswith("qlora_llama3_1_8b")
    assert changed["8-bit optimizer (torchao)"].cfg["optimizer"].keys() == {"_component_", "lr"}
    assert changed["16 ranks"].ranks == 16
    assert changed["expandable segments"].device.expandable
    for question in changed.values():  # each is a config that a recipe would take
        plan_request(OmegaConf.create(question.cfg), question.ranks)


def test_an_unknown_device_is_an_error_with_a_guess() -> None:
    with pytest.raises(ConfigError, match="Did you mean h100-80gb"):
        gpu("h100")
    assert gpu("H100-80GB").usable(1) > gpu("h100-80gb").usable(2)


def test_a_process_that_is_killed_has_status_2(tmp_path: Path) -> None:
    script = tmp_path / "killing.py"
    script.write_text(
        "import os, signal\n"
        "from torchtune_adaptive.plan import command as planning\n"
        "def killed(*_):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    planning.predict = killed\n"
        "    from torchtune_adaptive.cli import main\n"
        "    main()\n"
    )
    command = [sys.executable, str(script), "plan", "--config", "tiny/full", "--no-what-ifs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 2
    assert "a process that traced was ended from outside" in done.stderr
