"""The device's memory: what is counted on the simulated one, what is asked of a real one."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from tests.helpers.accelerator import OUT_OF_MEMORY, SOMETHING_ELSE
from torchtune_adaptive.core.device.memory import Usage, is_out_of_memory, plain_tensors
from torchtune_adaptive.core.device.simulated import SimulatedMemory


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_running_out_of_memory_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", SOMETHING_ELSE, ids=repr)
def test_a_bug_is_never_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


class TestSimulatedDevice:
    def test_counts_what_operations_create_until_nothing_refers_to_it(self) -> None:
        memory = SimulatedMemory(10_000)
        with memory.running():
            first = torch.zeros(100)
            assert memory.in_use() == 400
            second = first + 1
            assert memory.in_use() == 800
            del first
            assert memory.in_use() == 400
        del second
        assert memory.in_use() == 0
        assert memory.usage() == Usage(peak_bytes=800, peak_allocated_bytes=800, retries=0)

    def test_no_peak_has_what_did_not_fit(self) -> None:
        memory = SimulatedMemory(1_000)
        with memory.running():
            kept = torch.zeros(200)
            with pytest.raises(torch.OutOfMemoryError):
                torch.zeros(300)
        assert memory.usage().peak_bytes == kept.nbytes == 800

    def test_views_and_in_place_operations_take_nothing(self) -> None:
        memory = SimulatedMemory(10_000)
        with memory.running():
            tensor = torch.zeros(10, 10)
            view = tensor[2:].t().detach()
            tensor.add_(1).mul_(2)
            torch._foreach_add_([tensor], 1.0)
            torch.add(tensor, 1, out=tensor)
            assert memory.in_use() == 400
            assert view.shape == (10, 8)

    def test_raises_at_the_operation_that_passes_the_limit(self) -> None:
        memory = SimulatedMemory(1_000)
        with memory.running():
            kept = torch.zeros(200)
            with pytest.raises(
                torch.OutOfMemoryError, match="1,600 bytes needed at once, and there are 1,000"
            ):
                torch.ones(200)
            assert memory.in_use() == 800
            assert torch.zeros(40).sum() == 0  # what fits still works
            assert kept.sum() == 0

    def test_follows_storages_that_are_resized(self) -> None:
        memory = SimulatedMemory(1_000)
        original = torch.UntypedStorage.resize_
        with memory.running():
            tensor = torch.zeros(100)
            tensor.untyped_storage().resize_(0)
            assert memory.in_use() == 0
            tensor.untyped_storage().resize_(800)
            assert memory.in_use() == 800
            with pytest.raises(torch.OutOfMemoryError):
                tensor.untyped_storage().resize_(2_000)
            assert tensor.untyped_storage().nbytes() == 800
        assert torch.UntypedStorage.resize_ is original

    def test_counts_a_whole_training_step_to_the_byte(self) -> None:
        memory = SimulatedMemory(10**6)
        layer = torch.nn.Linear(10, 20, bias=False)
        memory.adopt(layer.parameters())
        memory.watch()
        assert memory.in_use() == 800
        with memory.running():
            rows = torch.ones(5, 10)  # 200
            out = layer(rows)  # 400, and the gradient of the sum expands to as much
            out.sum().backward()
            gradient = layer.weight.grad
            assert gradient is not None
            assert memory.in_use() == 800 + 200 + 400 + gradient.untyped_storage().nbytes()

    def test_what_exists_already_is_adopted_once(self) -> None:
        memory = SimulatedMemory(10**6)
        tensor = torch.zeros(100)
        memory.adopt([tensor, tensor.view(10, 10), tensor])
        assert memory.in_use() == 400
        del tensor
        assert memory.in_use() == 0

    def test_without_a_limit_nothing_is_counted_and_nothing_slows_down(self) -> None:
        memory = SimulatedMemory(None)
        with memory.running():
            kept = torch.zeros(100)
        assert memory.in_use() == 0 and kept.numel() == 100
        assert memory.capacity() > 10**8  # this machine has some

    def test_a_cap_lasts_as_long_as_its_context(self) -> None:
        memory = SimulatedMemory(1_000)
        with memory.capped(100):
            assert memory.capacity() == 100
            with memory.running(), pytest.raises(torch.OutOfMemoryError):
                torch.zeros(50)
        assert memory.capacity() == 1_000

    def test_the_peak_starts_where_the_watch_starts(self) -> None:
        memory = SimulatedMemory(10_000)
        with memory.running():
            torch.zeros(500)
            kept = torch.zeros(100)
            memory.watch()
            assert memory.usage().peak_bytes == 400
        del kept

    def test_the_graph_of_a_failed_step_is_not_counted_once_it_is_gone(self) -> None:
        memory = SimulatedMemory(100_000)
        weight = torch.ones(1000, requires_grad=True)
        memory.adopt([weight])

        def fail() -> None:
            with memory.running():
                total = weight
                for _ in range(100):
                    total = total * weight

        with pytest.raises(torch.OutOfMemoryError):
            fail()
        gc.collect()
        assert memory.in_use() == 4_000

    def test_collectives_work_and_are_repeatable(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            memory = SimulatedMemory(10**6)
            with memory.running():
                for _ in range(50):
                    mine, all_of_them = torch.ones(1000), torch.zeros(1000)
                    dist.all_reduce(mine)
                    dist.broadcast(mine, src=0)
                    dist.all_gather([all_of_them], mine)
                    assert all_of_them.sum() == 1000
                    dist.all_to_all_single(all_of_them, 2 * mine)
                    assert all_of_them.sum() == 2000
                    dist.barrier()
                    del mine, all_of_them
                    assert memory.in_use() == 0
        finally:
            dist.destroy_process_group()


def test_quantised_and_sharded_tensors_are_what_they_are_made_of() -> None:
    to_nf4 = pytest.importorskip("torchao.dtypes.nf4tensor").to_nf4

    quantised = to_nf4(torch.randn(64, 64), block_size=64, scaler_block_size=64)
    parts = list(plain_tensors(quantised))
    assert len(parts) > 1 and all(type(part) is torch.Tensor for part in parts)
    plain = torch.ones(3)
    assert list(plain_tensors(plain)) == [plain]
