"""Ends a run that is asked to stop: by SIGTERM, as schedulers do before they kill, or by Ctrl-C.

In training, the first signal is a request that the ranks exchange in the next step's all-reduce; they then
save a checkpoint and stop. Elsewhere there is nothing to save, or after an error in training nothing that
could be, and the run ends at once. So it does at a second signal, and when the time to stop is over.

The main thread may be inside a collective, where Python runs no signal handler, and an exception raised
inside a callback of the garbage collector is lost. So a thread receives the signals, and ends the process
if need be.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchtune_adaptive.common import Stopped, another_rank_has_failed, launcher, say
from torchtune_adaptive.recipe.signals import LISTENING, SIGNALS

SAME_REQUEST = 2.0
"""Seconds within which signals may be the same request: a launcher passes on what its processes got too."""
_RAISE_AGAIN = 1
"""The byte written to the socket where a request was not raised; the number of no signal in ``SIGNALS``."""
_UNWINDING = 10.0
"""Seconds that a run without anything to save has to end."""


def exit_status(signum: int) -> int:
    """The status that a shell reports of a process that a signal ended: 143 for SIGTERM, 130 for Ctrl-C."""
    return 128 + signum


class StopSignals:
    """Receives SIGTERM and Ctrl-C while the context lasts.

    Args:
        timeout: seconds that training has to save and stop; after that the process ends without.
        end: a function that ends the process with a status, whatever the main thread is doing.
    """

    def __init__(self, timeout: float, end: Callable[[int], Any] = os._exit) -> None:
        self._timeout = timeout
        self._end = end
        self._signal: int | None = None
        self._raised = False
        self._training = self._failed = self._over = False
        self._allowed = 0.0
        self.saved: str | None = None
        """The checkpoint that was saved because a stop was requested, by whichever rank."""

    @property
    def requested(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self._signal is not None

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """A context around the training loop: there a request waits for the end of the step."""
        self._training = True
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._training = False

    @property
    def reason(self) -> Stopped | None:
        """Why training has ended before its time, if it has."""
        if self.saved is None:
            return None
        return Stopped(
            f"stopped as requested, and saved {self.saved}. Resume with resume_from_checkpoint=True.",
            exit_status(self._signal or signal.SIGTERM),
            everywhere=True,
        )

    def raise_if_stopped(self) -> None:
        """Raise at the end of a run if it has ended before its time."""
        if self.reason is not None:
            raise self.reason

    # --- life -----------------------------------------------------------------------------------------

    def __enter__(self) -> StopSignals:
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return self  # only a main thread can: whoever calls from another sees to signals itself
        self._main = threading.get_ident()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        LISTENING.append(self._sender.fileno())
        self._hook, sys.unraisablehook = sys.unraisablehook, self._not_raised
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._installed:
            return
        sys.unraisablehook = self._hook
        signal.set_wakeup_fd(self._wakeup)
        LISTENING.remove(self._sender.fileno())
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._over = True
        self._sender.send(b"\0")  # closing it would not do: forked processes have it, too
        self._thread.join()
        self._sender.close()
        self._receiver.close()

    def _handle(self, number: int, _: FrameType | None) -> None:
        """End what has nothing to save; in the main thread, between two instructions."""
        self._signal = self._signal or number
        if not self._training and not self._raised:
            self._raised = True
            when = "while not training, so there is nothing to save"
            if self._failed:  # as when a rank is lost: the launcher then ends the others
                when = "after an error in training, so no checkpoint was saved"
            raise Stopped(f"stopped by {_name(number)} {when}.", exit_status(number))

    def _not_raised(self, what: sys.UnraisableHookArgs) -> None:
        """Ask again where Python drops the exception, as it does in a weak reference's callback."""
        if isinstance(what.exc_value, Stopped):
            self._raised = False
            self._sender.send(bytes([_RAISE_AGAIN]))
        else:
            self._hook(what)

    def _listen(self) -> None:
        """Receive signals in a thread, which runs whatever the main thread is waiting for."""
        began: float | None = None
        all_numbers: list[int] = []
        own = 0  # signals that this thread has sent, and not received yet
        while True:
            left = None if began is None else max(0.0, began + self._allowed - time.monotonic())
            ready, _, _ = select.select([self._receiver], [], [], left)
            if not ready:
                _say(
                    f"not done {self._allowed:g} s after {_name(self._signal or 0)}; ending at once."
                )
                self._end(exit_status(self._signal or signal.SIGTERM))
                return
            received = self._receiver.recv(64)
            numbers = [number for number in received if number in SIGNALS]
            own, numbers = max(0, own - len(numbers)), numbers[own:]
            now = time.monotonic()
            if self._over:
                return
            if _RAISE_AGAIN in received:
                time.sleep(0.05)  # the main thread is to be out of the hook that asked for it
                signal.pthread_kill(self._main, self._signal or signal.SIGTERM)
                own += 1
            if not numbers:
                continue
            all_numbers += numbers
            if began is None:
                self._signal = self._signal or numbers[0]
                self._allowed = self._timeout if self._training else _UNWINDING
                began = now
                if self._training:
                    _say(
                        f"{_name(numbers[0])}: saving a checkpoint after this step, then stopping "
                        f"(within {self._timeout:g} s; a second signal ends the run at once)."
                    )
            if now - began > SAME_REQUEST or not _are_one_request(all_numbers):
                _say(f"{_name(all_numbers[0])} again: ending at once, without a checkpoint.")
                self._end(exit_status(all_numbers[0]))
                return


def _are_one_request(numbers: list[int]) -> bool:
    """Whether signals that came within seconds are one request. Ctrl-C comes once, and from a launcher again;
    at the next one, the launcher ends, and its ranks get SIGTERM."""
    most = 1 + launcher.has_started_this()
    return len({*numbers}) == 1 and (signal.SIGINT not in numbers or len(numbers) <= most)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _say(what: str) -> None:
    if another_rank_has_failed():
        return  # that is why the launcher ends this one
    say(f"\nrank {launcher.rank()}: {what}")
