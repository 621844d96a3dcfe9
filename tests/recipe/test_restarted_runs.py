"""Runs of which ranks die or hang, and that torchrun starts again: ``--max-restarts``."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.killing import Fatal
from tests.helpers.restarted import assert_undisturbed, launched, said, wait_until
from tests.helpers.runs import free_port
from tests.helpers.validating import VALIDATES

pytestmark = [pytest.mark.runs, pytest.mark.alternating]

CHANGES: dict[str, Any] = {
    "use_maximum_batch_size": True,
    "adaptive_batching.memory_limit": "40MiB",
    "max_steps_per_epoch": 8,
    "save_every_n_steps": 3,
}
GRPO: dict[str, Any] = {"max_steps_per_epoch": 4, "save_every_n_steps": 1}
KILLS: dict[str, Fatal] = {
    "in the search": (1, "trial of 8 rows", signal.SIGKILL),
    "in a step": (0, "step 5", signal.SIGKILL),
    "while saving": (0, "saving the checkpoint epoch_0_step_6", signal.SIGKILL),
    "in the last step": (1, "step 8", signal.SIGKILL),
}


ELSEWHERE: dict[str, tuple[str, dict[str, Any], Fatal]] = {
    "in validation": ("full", VALIDATES, (1, "validation after step 4", signal.SIGKILL)),
    "rank 0, in validation": ("full", VALIDATES, (0, "validation after step 4", signal.SIGKILL)),
    "generating": ("grpo", GRPO, (1, "rollout 2, generating", signal.SIGKILL)),
    "rank 0, scoring": ("grpo", GRPO, (0, "rollout 2, scoring", signal.SIGKILL)),
}


@pytest.mark.rotating
@pytest.mark.parametrize("fatal", KILLS.values(), ids=KILLS)
def test_a_run_of_which_a_rank_is_killed_is_restarted_and_trains_the_same(
    fatal: Fatal, tmp_path: Path
) -> None:
    with launched(tmp_path, [fatal], "--max-restarts", "1", **CHANGES) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert "Restart 1 of 1." in said(tmp_path)
    assert "trial" in fatal[1] or "nothing to save" not in said(tmp_path)
    assert_undisturbed(tmp_path, **CHANGES)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "rendezvous",
    [(), ("--rdzv_backend", "static", "--rdzv_endpoint", "localhost:{port}")],
    ids=["standalone", "static"],
)
def test_it_is_restarted_again_and_again(rendezvous: Sequence[str], tmp_path: Path) -> None:
    options = [option.format(port=free_port()) for option in rendezvous]
    options += ["--max-restarts", f"{len(KILLS)}"]
    with launched(tmp_path, [*KILLS.values()], *options, **CHANGES) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert "Restart 4 of 4." in said(tmp_path)
    assert_undisturbed(tmp_path, **CHANGES)


def test_a_restart_goes_on_from_a_snapshot(tmp_path: Path, exhaustive: bool, shard: int) -> None:
    """Before the first checkpoint, or after one; at most as many steps are trained again as lie between."""
    every, kills = 2, [(1, "step 5", signal.SIGKILL), (0, "step 8", signal.SIGKILL)]
    if not exhaustive:
        kills = [kills[shard % 2]]
    changes = {**CHANGES, "save_every_n_steps": 5}
    snapshots = {"adaptive_batching.snapshot_every_n_steps": every}
    with launched(
        tmp_path, kills, "--max-restarts", f"{len(kills)}", **changes, **snapshots
    ) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    text = said(tmp_path)
    resumed = [int(step) for step in re.findall(r"Resuming from \S+ \(step (\d+)\)", text)]
    assert len(resumed) == len(kills) and "Resuming from /dev/shm/torchtune_adaptive_" in text, text
    done = [int(where.removeprefix("step ")) - 1 for _, where, _ in kills]
    assert all(one - from_ <= every for one, from_ in zip(done, resumed, strict=True)), resumed
    for left in re.findall(r"Resuming from (/dev/shm/torchtune_adaptive_\w+)", text):
        assert not Path(left).exists()
    assert_undisturbed(tmp_path, **changes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "changes", "fatal"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_wherever_a_rank_is_killed_the_run_is_the_same(
    kind: str, changes: dict[str, Any], fatal: Fatal, tmp_path: Path
) -> None:
    changes = {"max_steps_per_epoch": 8, "save_every_n_steps": 3, **changes}
    with launched(tmp_path, [fatal], "--max-restarts", "1", kind=kind, **changes) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert "Restart 1 of 1." in said(tmp_path)
    assert_undisturbed(tmp_path, kind, **changes)


@pytest.mark.exhaustive
def test_what_each_attempt_did_is_on_record(tmp_path: Path) -> None:
    killed: list[Fatal] = [(0, "step 6", signal.SIGKILL), (1, "step 8", signal.SIGKILL)]
    with launched(tmp_path, killed, "--max-restarts", "2", **CHANGES) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert_undisturbed(tmp_path, **CHANGES)
    assert said(tmp_path).count("Attempt 2 on 2 ranks, from step 3; steps 4-5 again; ") == 1
    assert "so it is not tried again" in said(tmp_path)
    lines = (tmp_path / "out" / "batch_size_events.jsonl").read_text().splitlines()
    attempts = [event for event in map(json.loads, lines) if "attempt" in event]
    assert [
        (each["attempt"], each["step"], each["ranks"], each["steps_again"]) for each in attempts
    ] == [(2, 3, [2, 2], "steps 4-5"), (3, 6, [2, 2], "step 7")]
    assert all(0 < each["seconds_since_last_step"] < 300 for each in attempts)
    report = (tmp_path / "out" / "report.html").read_text()
    assert "<th>attempts</th><td>3; 3 steps trained again in all</td>" in report
    assert "<th>steps</th><td>8</td>" in report


@pytest.mark.exhaustive
def test_attempts_that_come_no_further_end_the_run(tmp_path: Path) -> None:
    killed = [(1, "step 5", signal.SIGKILL)] * 5
    with launched(tmp_path, killed, "--max-restarts", "5", **CHANGES) as run:
        assert run.wait(timeout=300) != 0
    # The first began from the beginning, and three from step 3.
    assert "Attempt 4 on 2 ranks, from step 3" in said(tmp_path)
    assert "Attempt 5" not in said(tmp_path)
    assert "NoProgress: 3 attempts in a row have begun from" in said(tmp_path)
    assert "attempts that torchrun still makes end at once" in said(tmp_path)


@pytest.mark.exhaustive
def test_a_mistake_in_the_config_is_said_once_and_costs_one_attempt(tmp_path: Path) -> None:
    with launched(tmp_path, [], "--max-restarts", "5", **{**CHANGES, "epochs": 0}) as run:
        assert run.wait(timeout=300) != 0
    said_by_rank, _, said_by_torchrun = said(tmp_path).partition("attempts that torchrun still")
    assert said_by_rank.count("ConfigError: epochs") == 1, said(tmp_path)
    assert said_by_torchrun.count("ConfigError: epochs") == 1, "as the reason, in its report"


@pytest.mark.exhaustive
def test_a_run_of_which_a_rank_hangs_is_restarted(tmp_path: Path) -> None:
    hangs = (1, "step 5", signal.SIGSTOP)
    options = ("--max-restarts", "2", "--shutdown-timeout", "5")
    limit = {"adaptive_batching.rank_timeout": 10}
    with launched(tmp_path, [hangs], *options, **CHANGES, **limit) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert "rank 1 has sent no sign of life" in said(tmp_path), "the reason is printed"
    assert "Restart 1 of 2." in said(tmp_path)
    assert_undisturbed(tmp_path, **CHANGES)


@pytest.mark.exhaustive
def test_a_single_process_is_restarted(tmp_path: Path) -> None:
    killed = (0, "step 5", signal.SIGKILL)
    with launched(tmp_path, [killed], "--max-restarts", "1", ranks="1", **CHANGES) as run:
        assert run.wait(timeout=300) == 0, said(tmp_path)
    assert_undisturbed(tmp_path, ranks=1, **CHANGES)


@pytest.mark.exhaustive
def test_a_run_that_is_asked_to_stop_is_not_restarted(tmp_path: Path) -> None:
    changes = {**CHANGES, "max_steps_per_epoch": None, "save_every_n_steps": None, "epochs": 50}
    with launched(tmp_path, [], "--max-restarts", "2", **changes) as run:
        wait_until("step 1, loss", tmp_path)
        run.terminate()
        assert run.wait(timeout=300) != 0
    assert "Resume with resume_from_checkpoint=True" in said(tmp_path)
    assert "Restart" not in said(tmp_path)
    assert len(list((tmp_path / "out").glob("epoch_*_step_*"))) == 1
