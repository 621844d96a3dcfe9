"""A rank dies or hangs in the middle of a search; the others stop, soon, and say who it was and where."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.decoder import adamw, batch, tiny_decoder, train_step
from tests.helpers.ranks import Ended, run_ranks, watch_ranks
from torchtune_adaptive.common.errors import RankLost
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.ranks import watchdog as watchdog_module
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.ranks.watchdog import EXIT_CODE, Watchdog
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.step.exchange import Exchange
from torchtune_adaptive.core.step.retry import StepRunner
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.train.stop import StopSignals

pytestmark = pytest.mark.ranks

LIMIT = 5.0
VICTIM = 1


class Fate(TorchDispatchMode):
    """Does something terrible at the 200th operation of a step, which is in its backward pass."""

    def __init__(self, happen: Callable[[], Any]) -> None:
        super().__init__()
        self.happen = happen
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        self.seen += 1
        if self.seen == 200:
            self.happen()
        return func(*args, **(kwargs or {}))


def raise_bug() -> None:
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


FATES: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs": lambda: time.sleep(3600),
    "bug": raise_bug,
}


def rows_of(number: int) -> dict[str, Any]:
    return batch(rows=number)


def search_until(fate: str) -> None:
    ranks = Ranks(timeout=20 * LIMIT)  # a connection may take a fifth; all runs begin at once
    watchdog = Watchdog(ranks, limit=LIMIT)
    model = tiny_decoder(layers=2)
    memory = SimulatedMemory(10**9)
    step = train_step(model, [adamw(model)], memory=memory, ranks=ranks, launched=watchdog.tick)
    probe = Probe(
        step=step,
        accumulation=lambda size: 1,
        headroom=0.0,
        entering=lambda activity: watchdog.enter(activity, LIMIT),
    )
    with watchdog, probe:
        probe.prime(rows_of)
        probe.trial(2, rows_of)
        if ranks.rank == VICTIM:
            with Fate(FATES[fate]):
                probe.trial(4, rows_of)
        else:
            probe.trial(4, rows_of)
            raise AssertionError("a trial without its victim came to an end")


def slow_but_alive() -> str:
    """Longer than the limit in an activity that may take long, and in one where all ranks are slow."""
    ranks = Ranks(timeout=20 * LIMIT)
    watchdog = Watchdog(ranks, limit=LIMIT)
    with watchdog:
        watchdog.enter("loading the model", patience=None)
        if ranks.rank == 0:
            # Holds the interpreter's lock, as saving may.
            ctypes.PyDLL(None).usleep(int(1.5e6 * LIMIT))
        ranks.any(False)
        watchdog.enter("a long computation", patience=LIMIT)
        time.sleep(1.5 * LIMIT)
    return "done"


def leave_a_rank_alone() -> None:
    ranks = Ranks(timeout=20 * LIMIT)
    watchdog = Watchdog(ranks, limit=LIMIT, on_duty=False)
    with watchdog:
        ranks.any(False)
        watchdog.enter("step 3", patience=None)
        if ranks.rank == VICTIM:
            os._exit(1)
        ranks.any(False)


def save_and_be_stopped() -> None:
    """At once, when the thread that publishes signs has not had its next turn."""
    ranks = Ranks(timeout=20 * LIMIT)
    watchdog = Watchdog(ranks, limit=LIMIT)
    with watchdog:
        watchdog.enter("saving", patience=None)
        ranks.any(False)
        watchdog.enter("step 4", patience=LIMIT)
        if ranks.rank == VICTIM:
            FATES["stopped"]()
        ranks.any(False)


def be_stopped_before_saving(victim: int) -> None:
    """The other rank waits for it in an activity that may take any time."""
    ranks = Ranks(timeout=20 * LIMIT)
    watchdog = Watchdog(ranks, limit=LIMIT)
    with watchdog:
        watchdog.enter("step 4", patience=LIMIT)
        time.sleep(LIMIT / 5)  # both have heard each other
        ranks.any(False)
        if ranks.rank == victim:
            FATES["stopped"]()
        watchdog.enter("saving", patience=None)
        ranks.any(False)


def hold_the_lock_beside_one_that_trains(holder: int) -> None:
    """For several times the limit, with moments in which another thread of that rank may run."""
    ranks = Ranks(timeout=20 * LIMIT)
    watchdog = Watchdog(ranks, limit=LIMIT)
    with watchdog:
        watchdog.enter("step 4", patience=10 * LIMIT)
        ranks.any(False)
        time.sleep(LIMIT / 5)  # its last sign, as the holder has read it, is from step 4
        if ranks.rank == holder:
            watchdog.enter("saving", patience=None)
            for _ in range(3):
                ctypes.PyDLL(None).usleep(int(1.2e6 * LIMIT))
                time.sleep(1e-4)
        else:
            time.sleep(4 * LIMIT)
            watchdog.enter("saving", patience=None)
        ranks.any(False)


def wait_in_native_code() -> None:
    """As for a device: neither a signal's handler nor an exception of a collective gets through."""
    library = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)  # of zeros, which is an unlocked one
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def stop_beside_a_silent_rank(fate: str) -> None:
    """As torchrun asks for it when it has seen a rank die."""
    ranks = Ranks(timeout=20 * LIMIT)
    with StopSignals(timeout=20 * LIMIT) as stop, stop.while_training():
        watchdog = Watchdog(ranks, limit=20 * LIMIT, stop_requested=lambda: stop.requested)
        with watchdog:
            watchdog.enter("step 4", patience=20 * LIMIT)
            ranks.any(False)
            if ranks.rank == VICTIM:
                time.sleep(1.0)
                FATES[fate]()
            os.kill(os.getpid(), signal.SIGTERM)
            wait_in_native_code()


def lose_contact_beside_one_that_waits() -> None:
    """Rank 1 dies. Rank 0 exchanges something with it, and rank 2 waits where no error reaches it."""
    ranks = Ranks(timeout=20 * LIMIT)
    watchdog = Watchdog(ranks, limit=20 * LIMIT)
    with watchdog:
        watchdog.enter("step 4", patience=20 * LIMIT)
        ranks.any(False)
        if ranks.rank == VICTIM:
            FATES["killed"]()
        if ranks.rank == 2:
            wait_in_native_code()
        ranks.any(False)


def be_stopped_when_contact_is_lost() -> None:
    ranks = Ranks(timeout=20 * LIMIT)
    watchdog = Watchdog(ranks, limit=20 * LIMIT, stop_requested=lambda: True)
    with watchdog:
        watchdog.enter("step 4", patience=None)
        ranks.any(False)
        if ranks.rank == VICTIM:
            os._exit(1)
        ranks.any(False)


RUNS: dict[str, tuple[Callable[..., Any], list[Any], list[int]]] = {
    "killed": (search_until, ["killed"], [0]),
    "stopped": (search_until, ["stopped"], [0]),
    "hangs": (search_until, ["hangs"], [0]),
    "bug": (search_until, ["bug"], [0, 1]),
    "stopped after saving": (save_and_be_stopped, [], [0]),
    "rank 0 stopped before saving": (be_stopped_before_saving, [0], [1]),
    "rank 1 stopped before saving": (be_stopped_before_saving, [1], [0]),
    "stop requested, killed": (stop_beside_a_silent_rank, ["killed"], [0]),
    "stop requested, stopped": (stop_beside_a_silent_rank, ["stopped"], [0]),
    "stop requested, no contact": (be_stopped_when_contact_is_lost, [], [0]),
    "unwatched": (leave_a_rank_alone, [], [0, 1]),
    "slow but alive": (slow_but_alive, [], [0, 1]),
    "rank 0 holds the lock": (hold_the_lock_beside_one_that_trains, [0], [0, 1]),
    "rank 1 holds the lock": (hold_the_lock_beside_one_that_trains, [1], [0, 1]),
}
"""What two ranks run, its arguments, and which of the ranks must exit."""


@pytest.fixture(scope="module")
def ended() -> Iterator[dict[str, Future[list[Ended]]]]:
    """How each of the runs ends. Most of their time they wait, so they do it together."""
    with ThreadPoolExecutor(len(RUNS)) as threads:
        yield {
            name: threads.submit(watch_ranks, function, 2, *arguments, until_exit_of=exits)
            for name, (function, arguments, exits) in RUNS.items()
        }


@pytest.mark.parametrize("fate", ["killed", "stopped", "hangs"])
def test_the_others_stop_and_name_the_rank_and_the_activity(
    fate: str, ended: dict[str, Future[list[Ended]]]
) -> None:
    survivor, *_ = ended[fate].result()
    assert survivor.exit_code in (EXIT_CODE, 1), survivor.said
    assert f"rank {VICTIM}" in survivor.said
    assert "trial of 4 rows" in survivor.said
    if survivor.exit_code == 1:
        assert RankLost.__name__ in survivor.said


def test_a_rank_that_is_silent_just_after_it_saved_is_not_given_the_time_to_save(
    ended: dict[str, Future[list[Ended]]],
) -> None:
    survivor, _ = ended["stopped after saving"].result()
    assert survivor.exit_code == EXIT_CODE, survivor.said
    assert f"rank {VICTIM} has sent no sign of life" in survivor.said
    assert "its last sign came from 'step 4'" in survivor.said


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_silent_just_before_it_saves_is_not_given_the_time_to_save(
    victim: int, ended: dict[str, Future[list[Ended]]]
) -> None:
    survivor = ended[f"rank {victim} stopped before saving"].result()[1 - victim]
    assert survivor.exit_code == EXIT_CODE, survivor.said
    assert f"rank {victim} has sent no sign of life" in survivor.said
    assert "waits for it in 'saving'; its last sign came from 'step 4'" in survivor.said


@pytest.mark.parametrize("fate", ["killed", "stopped"])
def test_who_is_asked_to_stop_does_not_wait_for_a_silent_rank(
    fate: str, ended: dict[str, Future[list[Ended]]]
) -> None:
    survivor, _ = ended[f"stop requested, {fate}"].result()
    assert survivor.exit_code == EXIT_CODE, survivor.said
    assert f"rank {VICTIM} has sent no sign of life" in survivor.said
    silent = int(re.findall(r"for (\d+) s,", survivor.said)[0])
    assert silent < 2 * watchdog_module._LIMIT_TO_STOP, (
        "long before a launcher kills it, after 30 s"
    )


def test_who_is_asked_to_stop_and_has_lost_contact_ends_at_once(
    ended: dict[str, Future[list[Ended]]],
) -> None:
    survivor, _ = ended["stop requested, no contact"].result()
    assert survivor.exit_code == EXIT_CODE, survivor.said
    assert "lost contact with another rank in 'step 4', so no checkpoint can be" in survivor.said
    assert "identifying" not in survivor.said


def test_a_rank_that_lost_contact_tells_one_that_cannot_know() -> None:
    _, _, waiting = watch_ranks(lose_contact_beside_one_that_waits, 3, until_exit_of=[2])
    assert waiting.exit_code == EXIT_CODE, waiting.said
    named = rf"rank {VICTIM} has sent no sign of life for \d s|lost rank {VICTIM} \(silent"
    assert re.search(named, waiting.said), "and not after 100 s"


def test_the_rank_with_the_bug_says_what_it_is(ended: dict[str, Future[list[Ended]]]) -> None:
    survivor, victim = ended["bug"].result()
    assert "mat1 and mat2 shapes cannot be multiplied" in victim.said, victim.said + survivor.said
    assert victim.exit_code == 1 and survivor.exit_code in (EXIT_CODE, 1)
    assert f"rank {VICTIM}" in survivor.said


def test_where_nobody_watches_the_others_refer_to_the_rank_that_ended(
    ended: dict[str, Future[list[Ended]]],
) -> None:
    survivor, _ = ended["unwatched"].result()
    assert survivor.exit_code == 1
    assert "RankLost: another rank ended while this rank was in 'step 3'" in survivor.said


@pytest.mark.parametrize(
    "run", ["slow but alive", "rank 0 holds the lock", "rank 1 holds the lock"]
)
def test_patience_where_patience_is_due(run: str, ended: dict[str, Future[list[Ended]]]) -> None:
    for rank in ended[run].result():
        assert rank.exit_code == 0, rank.said


class Waiting(SimulatedMemory):
    """Memory of a device; to give back its cache is to wait for the device."""

    waits = 0

    def release(self) -> None:
        self.waits += 1
        super().release()


def train(step: TrainStep, error: Exception) -> None:
    def micro_batches(size: int) -> Iterator[Any]:
        yield batch(rows=size)
        raise error

    runner = StepRunner(step, advice=str)
    runner.begin(2, None)
    runner.run(micro_batches, 1)


def search(step: TrainStep, error: Exception) -> None:
    def enter(activity: str) -> None:
        step.memory.waits = 0  # type: ignore[attr-defined]
        raise error

    with Probe(step=step, accumulation=lambda size: 1, headroom=0.0, entering=enter) as probe:
        probe.prime(rows_of)


def run_rows(step: TrainStep, error: Exception) -> None:
    def work() -> None:
        raise error

    step.forward_only("scoring", work)


@pytest.mark.parametrize("work", [train, search, run_rows])
def test_who_has_lost_a_rank_does_not_wait_for_the_device(
    work: Callable[[TrainStep, Exception], None],
) -> None:
    """Where that would wait for the rank in a collective."""
    for error, waits in ((RankLost("rank 1 is gone"), 0), (ValueError("a mistake"), 1)):
        model, memory = tiny_decoder(layers=1, sharded=False), Waiting(None)
        step = train_step(model, [adamw(model)], memory=memory)
        memory.waits = 0
        with pytest.raises(type(error)):
            work(step, error)
        assert memory.waits == waits


class Operations(TorchDispatchMode):
    """What runs, on which dtypes: each is a kernel that a device loads when it is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = [str(one.dtype) for one in args if isinstance(one, torch.Tensor)]
        self.seen.add((str(func), *dtypes))
        return func(*args, **(kwargs or {}))


def what_runs_before_a_step_and_in_its_exchange() -> tuple[set[Any], set[Any]]:
    ranks, model = Ranks(timeout=100), tiny_decoder(layers=1)
    with Operations() as before:
        step = train_step(model, [adamw(model)], ranks=ranks, clip_grad_norm=1.0)
    step.forward_backward(batch(rows=2), last=True)
    exchange = Exchange._over_ranks
    with Operations() as later, pytest.MonkeyPatch.context() as patch:

        def seen(self: Exchange, told: Any) -> list[float]:
            later.seen.clear()
            summed = exchange(self, told)
            in_exchange.append(set(later.seen))
            return summed

        in_exchange: list[set[Any]] = []
        patch.setattr(Exchange, "_over_ranks", seen)
        assert not step.apply().lost
    return before.seen, in_exchange[0]


def test_what_the_exchange_runs_has_run_before_the_first_step() -> None:
    """A rank whose device is full by then could not load it, and the others would wait."""
    for before, in_exchange in run_ranks(what_runs_before_a_step_and_in_its_exchange, 2):
        assert ("aten.copy_.default", "torch.float64", "torch.float32") in in_exchange
        assert in_exchange <= before, in_exchange - before
