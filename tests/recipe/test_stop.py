"""What a signal does: in training, elsewhere, and when it comes again."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch

from tests.helpers.decoder import adamw
from tests.helpers.killing import in_child
from tests.helpers.models import tiny_llama, train_step
from tests.helpers.ranks import Alone
from torchtune_adaptive.common.errors import AdaptiveBatchingError, RankLost, Stopped
from torchtune_adaptive.recipe.install import install
from torchtune_adaptive.recipe.train import stop as stop_module
from torchtune_adaptive.recipe.train.stop import StopSignals


class Process:
    """Where a test sees how the process would have ended."""

    def __init__(self) -> None:
        self.ended: queue.Queue[int] = queue.Queue()

    def status(self) -> int:
        return self.ended.get(timeout=300)


def signals(timeout: float = 300.0) -> tuple[StopSignals, Process]:
    process = Process()
    return StopSignals(timeout, end=process.ended.put), process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_outside_training_the_run_ends(number: signal.Signals, status: int) -> None:
    stop, _ = signals()
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(Stopped, match="nothing to save") as raised, stop:
        signal.raise_signal(number)
    assert raised.value.status == status
    assert not isinstance(raised.value, (Exception, AdaptiveBatchingError)), "or it would be caught"
    assert {each: signal.getsignal(each) for each in before} == before


def test_in_training_it_is_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    stop, process = signals()
    with stop, stop.while_training():
        assert not stop.requested
        for _ in range(3):  # a launcher passes on what its processes have got already
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        time.sleep(0.1)
        assert process.ended.empty()
    assert capsys.readouterr().err.count("SIGTERM: saving a checkpoint after this step") == 1
    stop.raise_if_stopped()  # the run has ended by itself before the next step
    stop.saved = "out/epoch_0_step_4"
    with pytest.raises(Stopped, match=r"saved out/epoch_0_step_4\. Resume with") as raised:
        stop.raise_if_stopped()
    assert raised.value.status == 143


def test_after_an_error_in_training_it_does_not_say_that_there_was_nothing_to_save() -> None:
    """As when a rank is lost: the others leave training, and then the launcher ends them."""
    stop, _ = signals()
    with pytest.raises(Stopped) as raised, stop:  # noqa: PT012 - two moments
        with suppress(RankLost), stop.while_training():
            raise RankLost("lost rank 1")
        signal.raise_signal(signal.SIGTERM)
    assert str(raised.value) == (
        "stopped by SIGTERM after an error in training, so no checkpoint was saved."
    )


def test_a_rank_that_was_told_by_another_ends_with_the_same_status() -> None:
    stop, _ = signals()
    stop.saved = "out/epoch_0_step_4"
    with pytest.raises(Stopped) as raised:
        stop.raise_if_stopped()
    assert raised.value.status == 143


def test_again_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop_module, "SAME_REQUEST", 0.05)
    stop, process = signals()
    with stop, stop.while_training():
        end = time.monotonic() + 300
        while process.ended.empty() and time.monotonic() < end:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.2)
        assert process.status() == 130
    assert "Ctrl-C again: ending at once, without a checkpoint" in capsys.readouterr().err


INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("launched", "numbers", "ends"),
    [
        (False, [INT], False),
        (False, [INT, INT], True),
        (True, [INT, INT], False),  # from the terminal and from the launcher
        (True, [INT, INT, INT], True),
        (True, [INT, TERM], True),  # the launcher has ended
        (True, [TERM, TERM, TERM], False),
    ],
)
def test_ctrl_c_twice_ends_at_once_however_soon(
    launched: bool,
    numbers: list[signal.Signals],
    ends: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if launched:
        monkeypatch.setenv("RANK", "0")
    stop, process = signals()
    with stop, stop.while_training():
        for number in numbers:
            signal.raise_signal(number)
            time.sleep(0.05)
        if ends:
            assert process.status() == 130
        assert process.ended.empty()
    assert ("Ctrl-C again: ending at once" in capsys.readouterr().err) is ends


def test_the_time_to_stop_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    stop, process = signals(timeout=0.1)
    with stop, stop.while_training():
        signal.raise_signal(signal.SIGTERM)
        assert process.status() == 143
    assert "not done 0.1 s after SIGTERM; ending at once" in capsys.readouterr().err


def test_an_interrupt_that_a_callback_swallows_is_raised_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python ignores what is raised while an object is finalised, as in the simulated device."""

    class Tensor: ...

    def finalised(_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    stop, process = signals()
    tensor = Tensor()
    reference = weakref.ref(tensor, finalised)
    with pytest.raises(Stopped, match="while not training"), stop:  # noqa: PT012 - two moments
        try:
            del tensor
            time.sleep(300)  # until it is raised
        finally:
            time.sleep(0.2)  # the thread sees its own signal, too
    assert reference() is None
    assert process.ended.empty() and "Traceback" not in capsys.readouterr().err


def test_other_signals_and_forked_processes_do_not_count() -> None:
    install()
    stop, process = signals()
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with stop, stop.while_training():
            signal.raise_signal(signal.SIGUSR1)
            assert in_child(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
            time.sleep(0.1)
            assert not stop.requested and process.ended.empty()
    finally:
        signal.signal(signal.SIGUSR1, handler)


def test_it_ends_while_a_forked_process_lives() -> None:
    """As a process that fetches rows does: it has inherited the socket, which is thereby not closed."""
    stop, _ = signals()
    with stop:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    assert not stop._thread.is_alive()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_from_another_thread_nothing_is_installed() -> None:
    def use() -> None:
        stop, _ = signals()
        with stop:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()


def test_a_step_says_whether_to_stop() -> None:
    model = tiny_llama(layers=1, sharded=False)
    stop, _ = signals()
    step = train_step(
        model, [adamw(model)], ranks=Alone(), survive=False, stop_requested=lambda: stop.requested
    )
    batch = {"tokens": torch.ones(1, 6, dtype=torch.int64)}
    with stop, stop.while_training():
        for expected in (False, True):
            step.forward_backward({**batch, "labels": batch["tokens"]})
            assert step.apply().stop is expected
            signal.raise_signal(signal.SIGTERM)
