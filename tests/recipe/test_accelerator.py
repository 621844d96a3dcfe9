"""A run of a recipe on a stand-in for a card: what it logs of its memory, and what it keeps on the host."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.helpers.accelerator import Card
from tests.helpers.decoder import adamw, batch
from tests.helpers.models import tiny_llama, train_step
from tests.helpers.ranks import Alone
from torchtune_adaptive.core import MicroBatch, Split
from torchtune_adaptive.recipe.private import offloading_module as torchtune_offloading
from torchtune_adaptive.recipe.setup import offloading as offloading_module
from torchtune_adaptive.recipe.setup.environment import Environment
from torchtune_adaptive.recipe.setup.offloading import bound_by_host_memory, check_host_memory
from torchtune_adaptive.recipe.train.instruments import Profiling
from torchtune_adaptive.recipe.train.metrics import Logging, Metrics

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_peak_of_each_step_is_logged(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(16 * GIB)
    card.install(monkeypatch)
    model = tiny_llama(sharded=False)
    step = train_step(model, [adamw(model)], memory=card.memory(), ranks=Alone())
    here = Environment(torch.device("cuda", 0), torch.float32, Alone())
    records: list[dict[str, float]] = []
    logger = SimpleNamespace(log_dict=lambda record, step: records.append(record))
    metrics = Metrics(Logging(logger, 1, True), here, step.memory, watch_memory=True)
    metrics.begin()
    capacity = step.memory.capacity()
    for number, rows in enumerate((8, 8, 32, 8), start=1):
        step.memory.release()
        before = card.readings
        step.forward_backward(batch(rows))
        outcome = step.apply()
        assert not outcome.lost
        metrics.record(number, 8, Split(rows, 1, 1), outcome, 0.1, [MicroBatch((0, 1), rows)], {})
        assert card.readings - before == 1
    peaks = [record["peak_memory_reserved"] for record in records]
    assert peaks[2] > 2 * peaks[1]
    of_tensors = [record["peak_memory_alloc"] for record in records]
    assert of_tensors[2] > 2 * of_tensors[3] > 0, "each is that of its step"
    assert [record["memory_unused_share"] for record in records] == [
        1 - peak * GIB / capacity for peak in peaks
    ]
    summary = metrics.summary()
    assert summary is not None and summary.peak_bytes == max(peaks) * GIB


@pytest.mark.parametrize("enabled", [{}, {"enabled": False}])
def test_a_profiler_that_is_not_enabled_records_no_memory(enabled: dict[str, bool]) -> None:
    recorded: list[bool] = []
    memory: Any = SimpleNamespace(record_history=recorded.append)
    here = Environment(torch.device("cpu"), torch.float32, Alone())
    steps = {"wait_steps": 0, "warmup_steps": 0, "active_steps": 1}
    cfg = OmegaConf.create({"profiler": {"profile_memory": True, **steps, **enabled}})
    profiling = Profiling(cfg, here, memory)
    for number in range(2):
        profiling.before_step(0, number)
        profiling.after_step(0, number)
    assert not recorded


class OffloadsNothing(torch.autograd.graph.saved_tensors_hooks):
    """torchtune's offloading without a card to offload from."""

    use_streams = False

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


def offloading(model: torch.nn.Module, patch: pytest.MonkeyPatch) -> offloading_module.Offloading:
    """The offloading of a run, with all of torchtune's hooks."""
    for module in (offloading_module, torchtune_offloading()):
        patch.setattr(module, "OffloadActivations", OffloadsNothing)
    return offloading_module.Offloading(model, True)


def test_memory_may_run_out_while_a_layer_is_gathered_that_is_not_offloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = [True]

    def gather(*_: Any) -> None:  # before torchtune's own hook, as FSDP's is
        if full[0]:
            raise torch.OutOfMemoryError("while output is gathered")

    model = tiny_llama(sharded=False)
    assert isinstance(model.output, torch.nn.Module)
    model.output.register_forward_pre_hook(gather)
    step = train_step(
        model, [adamw(model)], ranks=Alone(), activations=offloading(model, monkeypatch)
    )
    for full[0] in (True, False):
        step.forward_backward(batch())
        assert step.apply().lost == full[0]


Available = namedtuple("Available", "available total")


class TestHostMemory:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: Available(20 * GIB, 100 * GIB))
        monkeypatch.setattr(offloading_module, "_limiting_groups", list)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")

    def test_a_container_may_have_less_than_the_machine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        groups = [Available(9 * GIB, 10 * GIB), Available(8 * GIB, 20 * GIB)]
        monkeypatch.setattr(offloading_module, "_limiting_groups", lambda: groups)
        check_host_memory(GIB // 2)
        with pytest.raises(torch.OutOfMemoryError, match="8,589,934,592 of 21,474,836,480 bytes"):
            check_host_memory(GIB)

    def test_every_rank_of_the_machine_must_find_room(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check_host_memory(GIB)  # 8 of 20 GiB, and 5 stay free
        with pytest.raises(torch.OutOfMemoryError, match="2,147,483,648 bytes on each of 8 ranks"):
            check_host_memory(GIB + 1)  # pinned memory is rounded to a power of two
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        check_host_memory(GIB + 1)

    def test_so_does_the_offloading_that_follows_a_lost_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fresh = offloading(torch.nn.Identity(), monkeypatch)()
        monkeypatch.setattr(psutil, "virtual_memory", lambda: Available(5 * GIB, 100 * GIB))
        with fresh, pytest.raises(torch.OutOfMemoryError, match="host memory"):
            (torch.ones(MIB, requires_grad=True) * 1).square()

    def test_offloading_stops_where_it_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        weight = torch.ones(MIB, requires_grad=True)
        with bound_by_host_memory(hooks):
            (weight * weight).sum().backward()
            assert packed
            monkeypatch.setattr(psutil, "virtual_memory", lambda: Available(5 * GIB, 100 * GIB))
            small = torch.ones(8, requires_grad=True)
            (small * small).sum().backward()
            with pytest.raises(torch.OutOfMemoryError, match="host memory"):
                (weight * 1).square()
