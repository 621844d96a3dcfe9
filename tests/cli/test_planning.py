"""The plan command: its output, its exit status, and that it does not affect the calling process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.helpers.planning import asked
from torchtune_adaptive.cli import plan_command as planning
from torchtune_adaptive.cli import plan_progress
from torchtune_adaptive.cli.answers import Answers
from torchtune_adaptive.cli.plan_command import _config
from torchtune_adaptive.cli.plan_options import _gpus, plan_command
from torchtune_adaptive.cli.plan_progress import Interrupted, TraceProgress
from torchtune_adaptive.planner.memory.gpus import GPUS
from torchtune_adaptive.recipe.plan.request import plan_request
from torchtune_adaptive.recipe.registry import load_config
from torchtune_adaptive.recipe.versions import require_supported_versions

PROGRAM = """
import os, sys, torch
import torchtune.config  # which sets variables, and which making the tiny model may import
from torch import distributed
from torchtune_adaptive.cli.command_line import main
from torchtune_adaptive.recipe.versions import require_supported_versions

if __name__ == "__main__":
    require_supported_versions()  # sets a variable for libraries, as each command does

    def state():
        backend = torch._C._get_privateuse1_backend_name()
        return backend, torch.UntypedStorage.resize_, dict(os.environ)

    before = state()
    try:
        main()
    finally:
        assert before == state()
        assert not distributed.is_initialized() and not hasattr(torch, "fakegpu")
"""


def run_plan(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "asking.py"  # a file: processes are made by importing it again
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def state_of_this_process() -> tuple[Any, ...]:
    backend = torch._C._get_privateuse1_backend_name()  # type: ignore[attr-defined]
    fake = dist.is_initialized(), hasattr(torch, "fakegpu")
    return backend, torch.UntypedStorage.resize_, dict(os.environ), fake


def test_a_plan_for_the_simulated_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which saves an import of torch; the exhaustive tests have commands."""
    line = ["--config", "tiny/full", "--nproc", "2", "--json", "--no-what-ifs"]
    line += ["adaptive_batching.probe_length=103"]
    require_supported_versions()  # as in PROGRAM
    before = state_of_this_process()
    assert plan_command(asked(line)) == 0
    assert state_of_this_process() == before
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert printed["verdict"] == "FITS"
    assert printed["largest"] == 14  # what the searches find without rounding
    assert printed["configured"]["parts"].keys() >= {"activations", "logits and loss", "parameters"}
    assert printed["configured"]["phase"] in ("forward", "backward")
    assert not printed["traced_directly"]


def test_a_plan_of_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["tiny/grpo", "--seq-len", "24", "--memory", "6MiB", "batch_size=4", "grpo_samples=2"]
    line += ["max_generated_tokens=8", "adaptive_batching.generation_batch_size=2"]
    line += [f"adaptive_batching.cache={tmp_path}"]
    assert plan_command(asked(line)) == 1
    text = capsys.readouterr().out
    assert plan_command(asked([*line, "--json"])) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["limiting_phase"]) == ("DOES NOT FIT", "training")
    assert text.startswith("Rollouts of 8 rows per rank: DOES NOT FIT. Training limits, with the ")
    assert "rows of 32 tokens (prompts of 24: --seq-len; responses of" in " ".join(text.split())
    phases = {phase["name"]: phase for phase in found["rollout"]["phases"]}
    assert phases.keys() == {"generation", "scoring", "training"}
    assert phases["generation"]["picked"]["rows"] == 2 == phases["generation"]["configured"]["rows"]
    assert phases["scoring"]["largest"] == phases["generation"]["largest"] == 8
    most = phases["training"]["largest"]
    assert 1 <= most < 8 and phases["training"]["picked"]["rows"] in (most, most - 1, most - 2)
    sizes = f"gradient_accumulation_steps={-(-8 // phases['training']['picked']['rows'])} "
    assert f"A search picks {sizes}" in text and sizes in found["rollout"]["overrides"]
    seconds = [phase["speed"]["seconds"] for phase in phases.values()]
    speed = found["rollout"]["speed"]
    assert min(seconds) > 0 and sum(seconds) == pytest.approx(speed["seconds"])
    assert found["tokens_per_second_per_gpu"] == pytest.approx(8 * 32 / speed["seconds"])
    # More micro-batches of training take longer, and generation is as it was.
    assert found["rollout"]["speed_picked"]["seconds"] > speed["seconds"]


@pytest.mark.exhaustive
def test_everything_that_is_predicted(tmp_path: Path) -> None:
    done = run_plan("--config", "tiny/full", "--nproc", "3", "--json",
                    "adaptive_batching.probe_length=64", f"adaptive_batching.cache={tmp_path}",
                    folder=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    names = {one["name"]: one["answer"] for one in printed["what_ifs"]}
    assert names.keys() >= {"activation checkpointing", "LoRA (rank 8)", "6 ranks", "1 rank"}
    assert names["activation checkpointing"]["largest"] > printed["largest"]
    assert names["6 ranks"]["configured"]["live"] < printed["configured"]["live"]
    # Parts as small as these stay as they are.
    assert names["8-bit optimizer (torchao)"]["configured"]["live"] == printed["configured"]["live"]
    assert printed["lengths"]["32"] >= 2 * printed["largest"] >= 4 * printed["lengths"]["128"]
    # 3 ranks cannot share 512 rows of an embedding evenly.
    assert printed["last_rank"]["rank"] == 2
    assert printed["last_rank"]["configured"]["live"] < printed["configured"]["live"]


@pytest.mark.exhaustive
def test_what_does_not_fit_has_status_1(tmp_path: Path) -> None:
    done = run_plan("--config", "tiny/full", "--memory", "1MiB", "--no-what-ifs", "batch_size=1",
                    folder=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"batch_size 1: DOES NOT FIT, peak 15\.\d MiB \(\+-0\.1%\) of 973 KiB", done.stdout
    )
    assert "Not even one row of 512 tokens fits." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--config", "tiny/ful"], "Did you mean tiny/full"),
        (
            ["--config", "llama3_1/8B_full", "--gpu", "h10-80gb"],
            "--list-gpus` shows those that are",
        ),
        (["llama3_1/8B_full", "--gpu", "a100"], "ambiguous. Use one of a100-40gb, a100-80gb"),
        (["tiny/full", "tiny/lora"], "'tiny/full' is not an override"),
        (["tiny/full", "--seq-len", "1"], "Use 2 tokens or more"),
        (["tiny/full", "--gpu", "h100"], "'cpu' is a simulated device"),
        (["tiny/full", "--compare", "a100-80gb"], "Set device=cuda, or name no GPU"),
        (["tiny/grpo", "--fastest"], "--fastest is not for recipes that generate the rows"),
        (["tiny/grpo", "--may-change", "exact"], "--may-change is not for recipes that"),
        (["tiny/ppo", "--compare", "h100,a100-80"], "--compare is not for recipes that"),
        (["tiny/full", "--method", "lora"], "is for --hf"),
        (["tiny/full", "~nothing"], "removes what the config does not have"),
        (["--hf", "/nowhere"], "'/nowhere' has no config.json that can be read"),
        (["meta-llama/Llama-3.1-8B"], "or its folder: --hf meta-llama/Llama-3.1-8B"),
        (["--config", "openai/gpt-oss-20b"], "is not a config. For a model of the Hub, or its"),
        (
            ["meta-llama/Llama-3.1-8B"],
            "configs of this model are llama3_1/8B_full_single_device, llama3",
        ),
        (["Llama-3.1-8B"], "or llama3_1/8B_qlora_single_device or"),
        (["llama3_1/8B"], "Did you mean llama3_1/8B_"),
        (["tiny/full", "max_seq_len=64"], "is not a key of this config. Write --seq-len 64"),
        (["tiny/full", "max_length=64"], "is not a key of this config. Write --seq-len 64"),
        (["tiny/full", "--batch_size", "4"], "--batch_size: '4' is not an option of plan. What a"),
        (["tiny/full", "--batch_size", "4"], "is written batch_size=4; --help lists"),
        (["tiny/full", "--batch-size=4"], "is written batch_size=4"),
        (["llama3_1/8B_full", "--gpu", "2x4090", "--nproc", "4"], "contradict the 2 of --gpu"),
        (["llama3_1/8B_full", "--compare", "h100,2x4090"], "'2x4090' is several GPUs"),
        (["--config", "tiny/full", "adaptive_batching.memory_limit=null"], "has no memory of its"),
        (["--config", "tiny/full", "batch_size=0"], "an integer >= 1"),
        (["--config", "tiny/full", "batch_size"], "Write key=value"),
        (["--config", "tiny/full", "--memory", "lots"], "--memory: 'lots' is not valid"),
        (["--config", "tiny/full", "--nproc", "0"], "Use 1 or more"),
        ([], "error: no config is given"),
    ],
)
def test_no_answer_has_status_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command(asked(arguments)) == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.out == ""
    assert plan_command(asked([*arguments, "--json"])) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert complaint.removeprefix("error: ") in error["message"]


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_built_has_status_2(tmp_path: Path) -> None:
    done = run_plan("--config", "tiny/full", "--no-what-ifs", "model.num_heads=3", folder=tmp_path)
    assert done.returncode == 2
    assert "cannot be made: ValueError: num_heads (3) must be divisible" in done.stderr


def test_overrides_may_contain_equals_signs() -> None:
    line = ["--config", "tiny/full", "tokenizer.prompt=a=b", "--nproc_per_node", "2"]
    arguments = asked(line)
    assert arguments.nproc == 2
    assert _config(arguments)[1].tokenizer.prompt == "a=b"


@pytest.mark.parametrize(
    "line",
    [
        ["tiny/full", "--nproc", "2", "batch_size=3"],
        ["batch_size=3", "--config", "tiny/full"],
        ["full_finetune_distributed", "--config", "tiny/full", "batch_size=3"],
        ["adaptive_full_finetune_distributed", "tiny/full", "batch_size=3"],
        ["my_recipe.py", "batch_size=3", "--config=tiny/full"],
    ],
)
def test_a_config_may_stand_anywhere_and_after_a_recipe(line: list[str]) -> None:
    name, cfg = _config(asked(line))
    assert (name, cfg.batch_size) == ("tiny/full", 3)


def test_options_may_be_written_as_torchrun_writes_them() -> None:
    given = asked(
        ["tiny/full", "--seq_len", "64", "--no_what_ifs", "--may_change=exact", "a_b=c_d"]
    )
    assert (given.seq_len, given.no_what_ifs, given.may_change) == (64, True, "exact")
    assert given.words == ["tiny/full", "a_b=c_d"] and not given.unknown
    numbers = {
        asked([option, "2"]).nproc for option in ("--nproc", "--nproc_per_node", "--nproc-per-node")
    }
    assert numbers == {2}


def test_a_length_may_be_named_as_others_do() -> None:
    for option in ("--seq-len", "--max-seq-len", "--max_seq_len", "--max-length"):
        assert asked(["tiny/full", option, "64"]).seq_len == 64


def test_a_variable_of_the_config_may_have_the_name_of_a_length(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    OmegaConf.save(OmegaConf.merge(load_config("tiny/full"), {"max_seq_len": 32}), path)
    assert _config(asked([str(path), "max_seq_len=64"]))[1].max_seq_len == 64


def test_a_number_of_gpus_may_stand_before_their_name() -> None:
    assert _gpus(None, "2x4090") == _gpus(2, "2x4090") == (2, "4090")
    assert _gpus(None, "8 x h100") == (8, "h100")
    assert _gpus(None, None) == (1, None)
    assert _gpus(4, "mi300x") == (4, "mi300x")


def test_long_tracing_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_progress, "_IN_LINES", 0.01)
    first, second = Future[int](), Future[int]()
    with TraceProgress(2) as progress:
        for number, future in enumerate((first, second), 1):
            progress.follow(future)
            threading.Timer(0.1, future.set_result, [number]).start()
            progress.wait(future)
        progress.wait()
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("tracing 1 of 2") > 2 and lines.count("tracing 2 of 2") > 2
    assert lines == sorted(lines)


def test_on_a_terminal_the_answer_takes_the_place_of_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with TraceProgress(1) as progress:
        assert "tracing 1 of 1" in capsys.readouterr().err
        progress.print("the answer\n")
        shown = capsys.readouterr()
        assert shown.err == "\r\033[K" and shown.out == "the answer\n"


def test_an_interruption_after_the_first_answer_keeps_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def plan(verdict: str | None) -> None:
        with TraceProgress(3) as progress:
            for work in ("alternatives", "alternatives", "the check"):
                progress.follow(Future[int](), work)
            progress.print("the answer\n", verdict)
            progress.wait()

    monkeypatch.setattr(plan_progress, "wait", interrupted)
    with pytest.raises(Interrupted, match=r"Not finished: alternatives \(2\), the check\.$") as end:
        plan("DOES NOT FIT")
    assert end.value.verdict == "DOES NOT FIT"
    with pytest.raises(KeyboardInterrupt):
        plan(None)

    def after_the_first_answer(*_: Any) -> Any:
        raise Interrupted("DOES NOT FIT", ["alternatives"])

    monkeypatch.setattr(planning, "_predict", after_the_first_answer)
    capsys.readouterr()
    arguments = ["tiny/full", "--memory", "64MiB", "device=cpu"]
    assert plan_command(asked(arguments)) == 1
    assert capsys.readouterr().err.endswith("Interrupted. Not finished: alternatives.\n")


@pytest.mark.exhaustive
def test_an_interruption_prints_the_alternatives_that_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited = TraceProgress.wait

    def interrupted_later(progress: TraceProgress, *futures: Future[Any]) -> None:
        waited(progress, *(futures or progress._followed))
        if not futures:
            last = Future[int]()
            progress.follow(last, "the check of the largest size")
            monkeypatch.setattr(plan_progress, "wait", interrupt)
            waited(progress)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(TraceProgress, "wait", interrupted_later)
    assert plan_command(asked(["tiny/full", "--memory", "64MiB", "device=cpu"])) == 0
    out, err = capsys.readouterr()
    assert "batch_size 2: FITS" in out.splitlines()[0] and "activation checkpointing" in out
    assert err.endswith("Interrupted. Not finished: the check of the largest size.\n")


def test_an_interruption_before_the_first_answer_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "_predict", interrupted)
    assert plan_command(asked(["tiny/full", "--memory", "64MiB", "device=cpu"])) == 130
    assert capsys.readouterr().err.endswith("plan: interrupted before the first answer\n")


def test_the_gpu_of_this_machine_is_for_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(asked(["tiny/full", "--gpu", "here"])) == 2
    assert "is a simulated device" in capsys.readouterr().err, "it is looked for"
    assert plan_command(asked(["train.py", "--gpu", "here"])) == 2


def test_known_gpus_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(asked(["--list_gpus"])) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["GPU", "total", "capacity"]
    assert ["t4-16gb", "14.6", "GiB", "14.1", "GiB", "13.1", "GiB", "reported"] in map(
        str.split, rows
    )
    assert len(rows) >= 24
    for one in GPUS.values():
        gigabytes = int(re.findall(r"-(\d+)gb", one.name)[0])
        assert 0.89 * gigabytes < one.gib < gigabytes
        assert re.match(r"https://[a-z.]+/\S+$", one.source)


def test_where_the_reader_of_traces_is_killed_the_step_is_traced() -> None:
    class Broken:
        def submit(self, *_: Any) -> Future[Any]:
            self.submitted = True
            raise BrokenProcessPool("ended abruptly")

    class BrokenLater(Broken):
        def submit(self, *_: Any) -> Future[Any]:
            self.submitted = True
            failed = Future[Any]()
            failed.set_exception(BrokenProcessPool("ended abruptly"))
            return failed

    def trace(work: Any, query: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result((work, query))
        return done

    query = plan_request(load_config("tiny/full"), 1).query()
    for pool in (Broken(), BrokenLater()):
        answers = Answers(False)
        answers._quick, answers._trace = pool, trace  # type: ignore[assignment]
        asked = answers.ask(print, query, urgent=True)
        assert asked.result() == (print, query) and pool.submitted


@pytest.mark.exhaustive
def test_a_process_that_is_killed_has_status_2(tmp_path: Path) -> None:
    script = tmp_path / "killing.py"
    script.write_text(
        "import os, signal\n"
        "from torchtune_adaptive.cli import plan_command as planning\n"
        "def killed(*_):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    planning.predict = killed\n"
        "    from torchtune_adaptive.cli.command_line import main\n"
        "    main()\n"
    )
    command = [sys.executable, str(script), "plan", "--config", "tiny/full", "--no-what-ifs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "a process that traced was killed by SIGKILL, perhaps because" in done.stderr
