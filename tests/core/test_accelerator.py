"""Memory behind a caching allocator, on a stand-in for a card: what is asked of it, and what a step does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.accelerator import OUT_OF_MEMORY, SOMETHING_ELSE, Card
from tests.helpers.decoder import adamw, batch, local_values, same_bits, tiny_decoder, train_step
from tests.helpers.ranks import Alone
from torchtune_adaptive.common.errors import TrainingOutOfMemory, UsageError
from torchtune_adaptive.core.device.accelerator import AcceleratorMemory, device_memory
from torchtune_adaptive.core.ranks.communicators import of_communicator
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.sizes.recovery import Recovery
from torchtune_adaptive.core.step.exchange import StepOutcome
from torchtune_adaptive.core.step.snapshot import Snapshot
from torchtune_adaptive.core.step.train_step import TrainStep

MIB = 1 << 20
GIB = 1 << 30


def probe_of(step: TrainStep) -> Probe:
    """One micro-batch in a step, all of the card."""
    return Probe(
        step=step,
        accumulation=lambda size: 1,
        headroom=0.0,
        entering=lambda phase: None,
    )


class FlatCard(Card):
    """A card whose statistics only ``torch.accelerator`` gives."""

    memory_stats_as_nested_dict = property()  # type: ignore[assignment]


class TestMemory:
    def card(self, patch: pytest.MonkeyPatch, **settings: Any) -> Card:
        card = Card(100 * MIB, **{"scale": 1, **settings})
        card.install(patch)
        return card

    def test_a_device_without_an_index_is_the_current_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.card(monkeypatch)
        memory = device_memory(torch.device("cuda"), 50 * MIB)  # the card refuses to be without one
        assert isinstance(memory, AcceleratorMemory)
        assert memory.name == "Fake 1000"

    @pytest.mark.parametrize("has_fp64", [True, False])
    def test_a_device_without_float64_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, has_fp64: bool
    ) -> None:
        card = self.card(monkeypatch)
        properties = lambda device: SimpleNamespace(has_fp64=has_fp64)  # noqa: E731
        monkeypatch.setattr(card, "get_device_properties", properties, raising=False)
        refused = nullcontext() if has_fp64 else pytest.raises(UsageError, match="Fake 1000 has no")
        with refused:
            device_memory(torch.device("xpu"))

    def test_capacity_is_what_this_process_can_get(self, monkeypatch: pytest.MonkeyPatch) -> None:
        card = self.card(monkeypatch, neighbour=30 * MIB)
        memory = card.memory()
        with memory.running():
            kept = torch.zeros(5 * MIB // 4)
        assert card.memory_reserved() == 20 * MIB
        assert memory.capacity() == 70 * MIB, "what it has already is in it"
        del kept
        for limit, capacity in ((50, 50), (90, 70)):
            card = self.card(monkeypatch, neighbour=30 * MIB)
            assert card.memory(limit * MIB).capacity() == capacity * MIB

    def test_a_limit_caps_the_allocator_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        card = self.card(monkeypatch)
        memory = card.memory(limit=50 * MIB)
        with memory.capped(25 * MIB):
            with memory.running(), pytest.raises(torch.OutOfMemoryError):
                torch.zeros(30 * MIB // 4)
        assert card.fractions == [0.5, 0.25, 0.5]
        with memory.running():
            torch.zeros(30 * MIB // 4)

    def test_the_fraction_of_the_user_is_respected_and_put_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        card = self.card(monkeypatch, fraction=0.6)
        memory = card.memory()
        assert memory.capacity() == 60 * MIB
        assert card.fractions == [], "nobody asked for another one"
        with memory.capped(30 * MIB):
            pass
        with memory.capped(90 * MIB):
            pass
        assert card.fractions == [0.3, 0.6, 0.6, 0.6]
        assert card.memory(limit=80 * MIB).capacity() == 60 * MIB

    def test_a_device_that_does_not_tell_its_fraction_gets_all_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Older(Card):
            get_per_process_memory_fraction = property()  # type: ignore[assignment]

        card = Older(100 * MIB, scale=1)
        card.install(monkeypatch)
        with card.memory().capped(25 * MIB):
            pass
        assert card.fractions == [0.25, 1.0]

    @pytest.mark.parametrize("kind", [Card, FlatCard])
    def test_reserved_memory_is_what_runs_out_and_retries_count(
        self, kind: type[Card], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        card = kind(100 * MIB, scale=1)
        card.install(monkeypatch)
        memory = card.memory()
        memory.watch()
        with memory.running():
            for size in (30, 40, 50):  # each too large for the segments that are cached
                torch.zeros(size * MIB // 4)
                card.synchronize()
        usage = memory.usage()
        assert (usage.peak_bytes, usage.peak_allocated_bytes) == (70 * MIB, 50 * MIB)
        assert usage.retries == 1
        memory.watch()
        assert memory.usage().retries == 0 and memory.statistics().retries == 1

    def test_what_is_released_is_all_that_nothing_refers_to(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        card = self.card(monkeypatch, lateness=1000)
        memory = card.memory()
        card.pinned = 7
        with memory.running():
            kept = torch.zeros(MIB)
            torch.zeros(10 * MIB)
        memory.release()
        assert memory.in_use() == 4 * MIB and card.memory_reserved() == 20 * MIB
        assert card.pinned == 0, "pinned host memory is cached as well"
        assert card.waits_with_lock == 0, "no thread can run while it waits for the device"
        del kept

    def test_pinned_memory_is_released_by_older_versions_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        card = self.card(monkeypatch)
        card.pinned = 7
        monkeypatch.delattr(torch.accelerator, "empty_host_cache")
        monkeypatch.setattr(torch._C, "_host_emptyCache", card.empty_host_cache, raising=False)
        card.memory().release()
        assert card.pinned == 0


class TestStep:
    """A step that runs out of memory is followed by the steps of a run that never did."""

    LARGE, SMALL = 32, 4

    @pytest.fixture
    def one_rank(self) -> Iterator[None]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        gc.freeze()  # or each collection after a failure would walk through all that is imported
        yield
        gc.unfreeze()
        dist.destroy_process_group()

    @pytest.fixture
    def start(
        self, one_rank: None, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., tuple[Card, TrainStep]]:
        def make(**settings: Any) -> tuple[Card, TrainStep]:
            card = Card(16 * GIB, **settings)
            card.install(monkeypatch)
            model = tiny_decoder(sharded=False)
            step = train_step(model, [adamw(model)], memory=card.memory(), ranks=Alone())
            self.take(step, rows=1)  # now the optimizer has its state
            step.memory.release()
            return card, step

        return make

    @staticmethod
    def take(step: TrainStep, rows: int) -> StepOutcome:
        step.memory.watch()
        step.forward_backward(batch(rows=rows))
        return step.apply()

    def room_for_small(self, step: TrainStep) -> int:
        """What a small step takes, and some; measured, and then the step is not as it was."""
        assert not self.take(step, self.SMALL).lost
        return int(step.memory.usage().peak_bytes * 1.1)

    @pytest.mark.parametrize("error", OUT_OF_MEMORY[::4], ids=str)  # test_memory has the others
    def test_it_recovers_whatever_the_device_calls_it(self, start: Any, error: Exception) -> None:
        _, healthy = start()
        room = self.room_for_small(healthy)
        card, step = start(
            error=lambda _: type(error)(*error.args)
        )  # anew: one that is raised keeps its frames
        recovery = Recovery(self.LARGE, [self.SMALL], None)
        with step.memory.capped(room):
            outcome = self.take(step, recovery.size)
            assert outcome.lost and outcome.failures[0] in ("forward", "backward")
            assert recovery.shrink()
            assert not self.take(step, recovery.size).lost
        assert same_bits(local_values(healthy.model), local_values(step.model))
        assert card.waits_with_lock == 0

    @pytest.mark.parametrize(
        "error", [e for e in SOMETHING_ELSE if isinstance(e, RuntimeError)], ids=str
    )
    def test_any_other_failure_ends_the_run(self, start: Any, error: Exception) -> None:
        _, step = start(error=lambda _: error)
        kind = TrainingOutOfMemory if of_communicator(error) else type(error)
        with step.memory.capped(step.memory.in_use()), pytest.raises(kind) as raised:
            self.take(step, self.LARGE)
        assert error in (raised.value, raised.value.__cause__)

    def test_a_lost_step_gives_its_memory_back(self, start: Any) -> None:
        _, step = start()
        in_use = step.memory.in_use()
        with step.memory.capped(in_use + 100 * MIB):
            assert self.take(step, self.LARGE).lost
        step.memory.release()
        assert step.memory.in_use() == in_use

    def test_no_memory_for_the_collectives_that_are_left_ends_the_run_in_one_line(
        self, start: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, step = start()

        def no_scratch(phase: str) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

        monkeypatch.setattr(step.collectives, "finish", no_scratch)
        with step.memory.capped(step.memory.in_use()):
            with pytest.raises(TrainingOutOfMemory, match=r"again in the buffers .* 1\.00 GiB"):
                self.take(step, self.LARGE)

    @pytest.mark.parametrize(
        ("retries", "fits"), [([0], True), ([2, 0], True), ([2, 1], False)], ids=str
    )
    def test_a_trial_that_was_done_with_retries_is_repeated_once(
        self, start: Any, monkeypatch: pytest.MonkeyPatch, retries: list[int], fits: bool
    ) -> None:
        _, step = start()
        probe = probe_of(step)
        with probe:
            usage, left = step.memory.usage, list(retries)
            monkeypatch.setattr(step.memory, "usage", lambda: replace(usage(), retries=left.pop(0)))
            assert probe.trial(2, lambda rows: batch(rows=rows)).fits is fits
            assert not left
        monkeypatch.undo()

    def test_timed_steps_ask_the_device_for_nothing_and_are_undone_once(
        self, start: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        card, step = start()
        before, restored = local_values(step.model), []
        restore = Snapshot.restore
        monkeypatch.setattr(Snapshot, "restore", lambda one: (restored.append(one), restore(one)))
        monkeypatch.setattr(step.memory, "clock", lambda: card.memory_reserved() / MIB)
        probe = probe_of(step)
        with probe:
            # The first step takes memory from the device, which takes time. The others find it cached.
            assert probe.timed("", [batch(rows=self.LARGE)], steps=3) == [0.0] * 3
            assert len(restored) == 1 and same_bits(local_values(step.model), before)

    def test_retries_are_those_of_the_step(self, start: Any) -> None:
        """What another size has left in the cache costs the first step retries, and not the second."""
        _, step = start()
        assert not self.take(step, self.LARGE).lost
        room = step.memory.usage().peak_bytes
        step.memory.release()
        with step.memory.capped(room):
            self.take(step, 24)
            first = self.take(step, self.LARGE)
            second = self.take(step, self.LARGE)
        assert first.retries > 0 and not first.lost
        assert second.retries == 0
