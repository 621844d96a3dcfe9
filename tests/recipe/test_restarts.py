"""How ranks meet that torchrun has started again, and what is said about restarts."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.helpers.ranks import Alone, run_ranks
from torchtune_adaptive.common.errors import RankLost
from torchtune_adaptive.core.ranks import store as store_module
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.environment import start_environment
from torchtune_adaptive.recipe.setup.restarts import join_process_group, say_what_restarts_do

CFG = OmegaConf.create({"device": "cpu", "dtype": "fp32"})
SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
ONE_MACHINE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
NOWHERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TWO_MACHINES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}


def restarted_twice() -> list[tuple[list[int], bool]]:
    """For each attempt, the ranks that met, and whether an error that NCCL has noted in the first is seen."""
    met = []
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    for attempt in range(3):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        if int(os.environ["RANK"]) == attempt % 2:
            time.sleep(0.5)  # the others find what the last attempt has left
        ranks = start_environment(Asked.of(CFG, "full"), patience=20.0).ranks
        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()  # type: ignore[attr-defined]
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if attempt == 0:
            store.set("exception_dump", "0")
        ranks.any(False)
        met.append((ranks.gather(ranks.rank), store.check(["exception_dump"])))
        ranks.close()
        dist.destroy_process_group()
    return met


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_attempt_meets_in_a_store_of_its_own(ranks: int) -> None:
    everyone = [*range(ranks)]
    for met in run_ranks(restarted_twice, ranks, join=False):
        assert met == [(everyone, True), (everyone, False), (everyone, False)]


def launched(monkeypatch: pytest.MonkeyPatch, restarts: int, most: int, **environment: str) -> None:
    for name, value in {
        **environment,
        "RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": f"{restarts}",
        "TORCHELASTIC_MAX_RESTARTS": f"{most}",
    }.items():
        monkeypatch.setenv(name, value)


def two_launchers() -> list[list[int]]:
    """The ranks that met in each attempt; each launcher counts its own, and one has just come."""
    met = []
    for attempt in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt if os.environ["RANK"] == "0" else 0)
        if int(os.environ["RANK"]) != attempt:
            time.sleep(0.5)
        join_process_group("gloo", timedelta(seconds=60))
        ranks = Ranks(20.0)
        met.append(ranks.gather(ranks.rank))
        ranks.close()
        dist.destroy_process_group()
    return met


@pytest.mark.ranks
def test_ranks_of_launchers_that_count_differently_meet() -> None:
    assert run_ranks(launched_apart, 2, join=False) == [[[0, 1], [0, 1]]] * 2


def launched_apart() -> list[list[int]]:
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3", **SHARED}
    return two_launchers()


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the machine that holds it is gone."""
    monkeypatch.setattr(store_module, "_ANSWER", timedelta(seconds=1))
    launched(monkeypatch, 1, 3, **TWO_MACHINES, **SHARED, **NOWHERE)
    with pytest.raises(RankLost, match=r"store of torchrun at 127.0.0.1 does not answer"):
        join_process_group("gloo", None)


@pytest.mark.parametrize(
    ("restarts", "most", "environment", "resumes", "said"),
    [
        (0, 0, {**TWO_MACHINES, **SHARED}, False, ""),
        (0, 3, {**ONE_MACHINE, **SHARED}, True, ""),
        (0, 3, {**ONE_MACHINE, **SHARED}, False, "a restart trains from the beginning"),
        (0, 3, {**TWO_MACHINES, **SHARED}, True, "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in"),
        (0, 3, {**TWO_MACHINES, "TORCHELASTIC_USE_AGENT_STORE": "False"}, True, ""),
        (2, 3, {**ONE_MACHINE, **SHARED}, True, "Restart 2 of 3."),
    ],
)
def test_what_is_said_about_restarts(
    restarts: int,
    most: int,
    environment: dict[str, str],
    resumes: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "propagate", True)
    launched(monkeypatch, restarts, most, **environment)
    cfg = OmegaConf.create({"resume_from_checkpoint": resumes})
    say_what_restarts_do(Asked.of(cfg, "full"), Alone())
    # pytest listens to a logger that does not propagate, too, as another test may have left it.
    assert len({*caplog.messages}) == bool(said)
    assert said in "".join(caplog.messages)
