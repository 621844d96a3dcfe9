"""``tune-adaptive run``: ranks are forked, restarts take no imports, and ``--elastic`` leaves GPUs out."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.helpers import restarted
from tests.helpers.killing import Fatal
from tests.helpers.restarted import assert_undisturbed, said, wait_until
from tests.helpers.runs import (
    BIN,
    logged,
    losses,
    start,
    undisturbed,
)
from torchtune_adaptive.cli import run_command
from torchtune_adaptive.cli.elastic import Devices, bounds
from torchtune_adaptive.common import ConfigError

RECIPE = "adaptive_full_finetune_distributed"
CHANGES: dict[str, Any] = {
    "batch_size": 2,
    "max_steps_per_epoch": 6,
    "save_every_n_steps": 2,
}


# --- which GPUs ---------------------------------------------------------------------------------------


def test_all_gpus_that_work_are_chosen_in_order() -> None:
    devices = Devices("0123", least=1)
    assert devices.chosen("3120") == [*"0123"]
    assert devices.chosen("31") == [*"13"]
    assert devices.chosen("0123") == [*"0123"], "one that works again is taken again"


def test_a_gpu_that_fails_twice_in_a_row_is_left_out() -> None:
    devices = Devices("0123", least=1)
    assert [devices.failed(name) for name in "12122"] == [False, False, False, False, True]
    assert devices.chosen("0123") == [*"013"]
    assert not devices.failed("2"), "it is said once"


def test_a_gpu_that_has_failed_is_taken_where_there_would_be_too_few() -> None:
    devices = Devices("01", least=2)
    devices.failed("1")
    assert devices.failed("1")
    assert devices.chosen("01") == [*"01"]
    with pytest.raises(ConfigError, match="asks for 2 GPUs or more, and 1 work"):
        devices.chosen("0")


SAYS = "rank 1 has sent no sign of life for 45 s, and this rank waits for it in 'step 3'"


@pytest.mark.parametrize(
    ("first", "said", "left_out"),
    [
        (0, SAYS, "1"),
        (2, "RankLost: lost rank 1 (silent; its last sign came from 'step 3') while", "1"),
        (1, None, "1"),
        (1, "ConfigError: headroom: 2 is not valid", None),
    ],
    ids=["hangs", "is lost", "fails", "says its own reason"],
)
def test_a_gpu_is_left_out_whose_rank_fails_or_is_named_by_the_others(
    first: int,
    said: str | None,
    left_out: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "error.json"
    if said is not None:
        message = {"message": said, "extraInfo": {"timestamp": "1"}}
        file.write_text(json.dumps({"message": message}))
    started: list[str] = []

    def fail(asked: argparse.Namespace, *_: object) -> None:
        started.append(asked.nproc_per_node)
        raise ChildFailedError("recipe", {first: ProcessFailure(first, 9, 70, str(file))})

    monkeypatch.setattr(run_command, "_launch", fail)
    monkeypatch.setattr(run_command, "_choose_start_method", lambda *_: None)
    options = ["--elastic", "--nproc_per_node", "1:3", "--max-restarts", "2", RECIPE]
    asked = run_command._parser().parse_args([*options, "--config", "tiny/full"])
    with pytest.raises(ChildFailedError):
        run_command._run_elastic(asked, RECIPE, asked.training_script_args)
    assert started == ["3", "3", "2" if left_out else "3"]


@pytest.mark.parametrize(
    ("given", "found"), [("8", (1, "8")), ("2:8", (2, "8")), ("1:gpu", (1, "gpu"))]
)
def test_the_fewest_and_the_most_ranks(given: str, found: tuple[int, str]) -> None:
    assert bounds(given) == found


@pytest.mark.parametrize("given", ["0:2", ":2", "2:", "a:2", "-1:2", "1:2:3"])
def test_nonsense_is_no_range(given: str) -> None:
    with pytest.raises(ConfigError, match="is not MIN:MAX"):
        bounds(given)


# --- the server ---------------------------------------------------------------------------------------

DIFFERS = (
    *(
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
    ),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
)
"""Variables that torchrun sets for each rank, beside those that begin with TORCHELASTIC_."""
IMPORT = """
import os, sys
read, get = set(), type(os.environ).__getitem__
def reading(self, name):
    caller = sys._getframe(1)
    while caller.f_code.co_filename.startswith(("<frozen", os.path.dirname(os.__file__) + "/os.py")):
        caller = caller.f_back
    if not caller.f_code.co_filename.endswith("tqdm/utils.py"):  # looks at all names for its own
        read.add(name)
    return get(self, name)
type(os.environ).__getitem__ = reading
import torch
import torchtune_adaptive.cli.preloaded as preloaded
assert not torch.cuda.is_initialized() and not torch.accelerator.is_available()
assert not preloaded.THREADS, preloaded.THREADS
assert "torchtune_adaptive.recipe.run" in sys.modules
print(*read)
"""


def python(program: str, **environment: str) -> str:
    # An import that looks at all names would seem to ask for what tests before this one have left.
    left = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**left, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


def test_what_is_imported_before_a_fork_reads_nothing_that_differs_from_rank_to_rank() -> None:
    read = python(IMPORT).split()
    assert "TORCH_LOGS" in read, "reading is noticed"
    assert not {name for name in read if name in DIFFERS or name.startswith("TORCHELASTIC_")}


ON_A_GPU = """
import os, torch
here = os.getpid()
torch.cuda.is_available = lambda: os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
def capability(device=None):
    assert os.getpid() != here, "CUDA is initialized before the fork"
    {answer}
def has_triton():
    assert os.getpid() != here, "CUDA is initialized before the fork"
    return True
torch.cuda.get_device_capability = capability
import torch.utils._triton
torch.utils._triton.has_triton = has_triton
from torchtune_adaptive.core import before_fork
with before_fork.cuda_uninitialized():
    print(torch.cuda.get_device_capability(), torch.utils._triton.has_triton())
assert torch.cuda.get_device_capability is capability
assert torch.utils._triton.has_triton is has_triton
assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
"""


def test_what_the_gpu_can_do_is_asked_in_another_process() -> None:
    assert python(ON_A_GPU.format(answer="return 9, 0")).split("\n")[0] == "(9, 0) True"


def test_a_gpu_that_does_not_answer_is_asked_as_always() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        python(ON_A_GPU.format(answer="os._exit(1)"))


# --- the command line ---------------------------------------------------------------------------------

WITHOUT_A_TIMEOUT = """
import argparse
from torchtune_adaptive.cli import run_command
asked = argparse.Namespace(start_method="forkserver")
run_command._choose_start_method(asked, 1)
print(asked.start_method)
"""


def test_ranks_are_forked_where_torchrun_has_no_shutdown_timeout() -> None:
    """As in torch 2.11."""
    assert python(WITHOUT_A_TIMEOUT).split()[-1] == "forkserver"


def refused(*words: str) -> str:
    done = subprocess.run(
        [BIN / "tune-adaptive", "run", *words], stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.runs
@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc_per_node", "1:2", RECIPE], "is a range, which is for --elastic. Add --elastic"),
        (["--nproc_per_node", "2", "--elastic", "--max-restarts", "x", RECIPE], "invalid int"),
        (["--nproc_per_node", "3:2", "--elastic", RECIPE], "asks for 3 GPUs or more, and 2 work"),
        (["--nproc_per_node", "x:2", "--elastic", RECIPE], "is not MIN:MAX"),
        (["--nnodes", "2", "--elastic", RECIPE], "does not go with --elastic"),
        (["--nproc_per_node", "many", RECIPE], "'many' is no number of ranks here"),
        (["--nproc_per_node", "0", RECIPE], "is less than 1"),
        (["--max-restarts", "-1", "--elastic", RECIPE], "-1 is less than 0"),
        (["--nproc_per_node", "2", "lora_finetune_single_device"], "does not run on several ranks"),
    ],
    ids=lambda given: "" if isinstance(given, str) else " ".join(given[:-1]),
)
def test_options_that_make_no_sense_are_refused(words: list[str], said: str) -> None:
    config = "llama3_2/1B_lora_single_device" if "lora" in words[-1] else "tiny/full"
    assert said in refused(*words, "--config", config)


@pytest.mark.runs
@pytest.mark.alternating
def test_an_elastic_run_says_what_its_config_lacks() -> None:
    printed = refused("--nproc_per_node", "3:2", "--elastic", RECIPE, "--config", "tiny/full")
    assert "without resume_from_checkpoint=True save_every_n_steps=100" in printed


@pytest.mark.runs
@pytest.mark.alternating
def test_a_config_is_required() -> None:
    assert "The '--config' argument is required" in refused("--nproc_per_node", "2", RECIPE)


# --- runs ---------------------------------------------------------------------------------------------


@contextmanager
def launched(
    folder: Path, fatal: Sequence[Fatal], *options: str, **how: Any
) -> Iterator[subprocess.Popen[str]]:
    """A run of ours, of which nothing is left."""
    with restarted.launched(folder, fatal, *options, program="tune-adaptive", **how) as run:
        yield run
    wait_for_the_end_in(folder)


def processes_in(directory: Path) -> list[str]:
    """The processes that work in a directory: a launcher, the server and the ranks."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cwd").readlink() == directory:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":  # whoever inherits it has not looked yet
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has just ended
    return found


def wait_for_the_end_in(directory: Path) -> None:
    end = time.monotonic() + 60
    while left := processes_in(directory):
        assert time.monotonic() < end, left
        time.sleep(0.05)


@pytest.mark.runs
@pytest.mark.alternating
def test_a_run_of_which_ranks_are_killed_is_restarted_and_trains_the_same(tmp_path: Path) -> None:
    killed: list[Fatal] = [(1, "step 4", signal.SIGKILL), (0, "step 6", signal.SIGKILL)]
    with launched(tmp_path, killed, "--max-restarts", "2", **CHANGES) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert "Restart 2 of 2." in said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    assert_undisturbed(tmp_path, **CHANGES)


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.parametrize(
    "start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.exhaustive)]
)
def test_a_place_whose_rank_cannot_start_is_left_out(start_method: str, tmp_path: Path) -> None:
    dies: Fatal = (1, "loading the model", signal.SIGKILL)
    options = ("--elastic", "--max-restarts", "2", "--start-method", start_method)
    with launched(tmp_path, [dies, dies], *options, ranks="1:2", **CHANGES) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert (
        "GPU 1 is left out, as its rank was the first to fail, or to be lost, 2 times in a row"
        in said(tmp_path)
    )
    assert "Restart 2 of 2." in said(tmp_path)
    assert sorted(logged(tmp_path)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.runs
@pytest.mark.alternating
def test_an_elastic_run_with_a_mistake_makes_one_attempt(tmp_path: Path) -> None:
    options = ("--elastic", "--max-restarts", "5")
    with launched(tmp_path, [], *options, **CHANGES, **{"adaptive_batching.headroom": 2}) as run:
        assert run.wait(timeout=300) == 1
    assert "Restart" not in said(tmp_path) and "adaptive_batching.headroom: 2" in said(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.runs
def test_an_elastic_run_that_comes_no_further_ends(tmp_path: Path) -> None:
    dies: Fatal = (0, "step 2", signal.SIGKILL)  # before the first checkpoint
    options = ("--elastic", "--max-restarts", "9")
    with launched(tmp_path, [dies] * 9, *options, **CHANGES) as run:
        assert run.wait(timeout=300) == 1
    assert "NoProgress: 3 attempts in a row have begun from the beginning" in said(tmp_path)


@pytest.mark.runs
@pytest.mark.alternating
def test_an_elastic_run_keeps_its_batch_when_a_rank_is_gone(tmp_path: Path) -> None:
    killed: list[Fatal] = [(1, "step 4", signal.SIGKILL), (1, "loading the model", signal.SIGKILL)]
    options = ("--elastic", "--max-restarts", "2")
    with launched(tmp_path, killed, *options, ranks="1:2", **CHANGES) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert "1 rank instead of 2: the order of samples and the global batch of 4 rows stay" in said(
        tmp_path
    )
    _, records = undisturbed("full", 2, **CHANGES)
    expected = dict(enumerate(losses(records), 1))
    assert logged(tmp_path, rel=1e-5) == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.runs
def test_a_rank_that_hangs_is_killed_after_the_time_that_was_given(tmp_path: Path) -> None:
    hangs: Fatal = (1, "step 4", signal.SIGSTOP)
    options = ("--max-restarts", "1", "--shutdown-timeout", "2")
    limit = {"adaptive_batching.rank_timeout": 10}
    with launched(tmp_path, [hangs], *options, **CHANGES, **limit) as run:
        wait_until("has sent no sign of life", tmp_path)
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert "forcefully exiting via SIGKILL" in said(tmp_path)
    assert_undisturbed(tmp_path, **CHANGES)


LONG = {**CHANGES, "max_steps_per_epoch": None, "save_every_n_steps": None, "epochs": 50}


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_asked_to_stop_stops_and_saves(number: int, tmp_path: Path) -> None:
    with launched(tmp_path, [], "--max-restarts", "2", **LONG) as run:
        wait_until("step 1, loss", tmp_path)
        os.killpg(run.pid, number)  # as schedulers and terminals do: the server gets it, too
        assert run.wait(timeout=300) == 128 + number
    assert "Resume with resume_from_checkpoint=True" in said(tmp_path)
    assert "Restart" not in said(tmp_path) and "Traceback" not in said(tmp_path)
    assert len(list((tmp_path / "out").glob("epoch_*_step_*"))) == 1


STOPPING = """
from torchtune_adaptive.recipe import require_supported_versions
require_supported_versions()
import time
from torchtune_adaptive.recipe.train.stop import StopSignals
with StopSignals(300.0) as stop, stop.while_training():
    print("trains", flush=True)
    time.sleep(600)
"""


@pytest.mark.rotating
@pytest.mark.runs
@pytest.mark.parametrize("program", ["tune", "tune-adaptive"])
def test_ctrl_c_twice_ends_a_launched_run_at_once(program: str, tmp_path: Path) -> None:
    """With `tune run` it reaches the launcher alone, and with ours the ranks as well."""
    (tmp_path / "mine.py").write_text(STOPPING)
    command = [BIN / program, "run", "--nproc_per_node", "2", "mine.py", "--config", "tiny/full"]
    run = start(command, tmp_path, tmp_path / "said")
    wait_until("trains", tmp_path, times=2, run=run)
    os.killpg(run.pid, signal.SIGINT)
    wait_until("rank 0: Ctrl-C: saving a checkpoint", tmp_path)
    wait_until("signal SIGINT", tmp_path, times=2)  # the launcher has passed the first one on
    os.killpg(run.pid, signal.SIGINT)
    run.wait(timeout=20)
    wait_for_the_end_in(tmp_path)
    assert said(tmp_path).count("Ctrl-C again: ending at once, without a checkpoint") == 2
    assert program == "tune" or "Traceback" not in said(tmp_path)


@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize(("program", "sharded"), [("tune", True), ("tune-adaptive", False)])
def test_nothing_is_left_of_a_launcher_that_is_killed(
    program: str, sharded: bool, tmp_path: Path
) -> None:
    """Nor is what it was needed for: the store in which its ranks have met."""
    changes = {**LONG, "adaptive_batching.sharded_checkpoints": sharded}
    with restarted.launched(tmp_path, [], program=program, **changes) as run:
        wait_until("step 1, loss", tmp_path)
        assert len(processes_in(tmp_path)) >= 3
        run.kill()
        wait_for_the_end_in(tmp_path)
    assert "Resume with resume_from_checkpoint=True" in said(tmp_path)
    assert len(list((tmp_path / "out").glob("epoch_*_step_*"))) == 1


FAILING = """
import atexit, os, sys, time
from pathlib import Path

def at_the_end():
    print("at the end", flush=True)
    # Once a rank has failed, the launcher ends the others: not before they have come here.
    Path(f"ended_{{os.environ['RANK']}}").touch()
    end = time.monotonic() + 60
    while len([*Path().glob("ended_*")]) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
        time.sleep(0.05)

atexit.register(at_the_end)
{ends}
"""


def program(folder: Path, ends: str, *options: str) -> tuple[int, str]:
    """What a recipe of the user's own ends with, on two ranks."""
    (folder / "mine.py").write_text(FAILING.format(ends=ends))
    command = [BIN / "tune-adaptive", "run", *options, "mine.py", "--config", "tiny/full"]
    run = start(command, folder, folder / "said")
    status = run.wait(timeout=300)
    wait_for_the_end_in(folder)
    return status, said(folder)


@pytest.mark.rotating(2)
@pytest.mark.runs
@pytest.mark.alternating
@pytest.mark.parametrize(
    ("ends", "status", "text"),
    [
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("sys.exit('because')", 1, "because"),
        ("sys.exit(3)", 1, "exitcode  : 3"),
        ("sys.exit()", 0, "at the end"),
    ],
    ids=["error", "message", "status", "none"],
)
def test_a_recipe_ends_as_with_python(ends: str, status: int, text: str, tmp_path: Path) -> None:
    options = ("--nproc_per_node", "2", "--log-dir", "logs", "--tee", "3")
    ended, printed = program(tmp_path, ends, *options)
    assert (ended, text in printed) == (status, True), printed
    assert printed.count("]:at the end\n") == 2, printed
    logs = [*(tmp_path / "logs").glob("*/attempt_0/*/stdout.log")]
    assert [log.read_text() for log in logs] == ["at the end\n"] * 2
