"""The speed of trainers' steps: what is traced only in part, or pretended, is computed and moved in full."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.hugging_face import about
from tests.helpers.torchvision import without_torchvision
from torchtune_adaptive import Machine, Speed, TransformersStep, UsageError
from torchtune_adaptive.library.four_bit import FourBitLinear
from torchtune_adaptive.library.liger_kernels import CrossEntropy, GatedProduct, Norm, rotated
from torchtune_adaptive.library.trainer_optimizers import BlockwiseAdamW
from torchtune_adaptive.library.trainer_parts import TiledLogProbs
from torchtune_adaptive.planner import fake_device
from torchtune_adaptive.planner.speed.operations import Operation
from torchtune_adaptive.planner.trace.operation_log import OperationLog

LAYERS, WIDTH, INNER, WORDS, HEADS = 3, 512, 1024, 32000, 8
SHAPE = about("Llama", WORDS, LAYERS, HEADS, HEADS, WIDTH, INNER, 4096, tie_word_embeddings=False)
LENGTH, PEAK = 1024, 989e12


@pytest.fixture
def speed(tmp_path: Path) -> Callable[..., Speed]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))

    def found(**settings: Any) -> Speed:
        machine = settings.pop("machine", None)
        step = TransformersStep(
            folder=str(tmp_path), **{"dtype": "bfloat16", "max_length": LENGTH, **settings}
        )
        with without_torchvision():
            plan = step.plan(
                "h100-80gb", ceiling=16, cache=str(tmp_path / "cache"), machine=machine
            )
        assert plan.speed is not None
        return plan.speed

    return found


def flops(speed: Speed) -> float:
    return speed.mfu * speed.seconds * PEAK


@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize("rows", [2, 16])
def test_the_head_of_trl_computes_all_tiles(speed: Callable[..., Speed], rows: int) -> None:
    found = speed(per_device_train_batch_size=rows)
    each = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
    attention = 7 * LENGTH * WIDTH  # half of what is not causal
    in_layers = LAYERS * (6 * each + attention)
    # Backward computes the logits again, in operations of its own.
    head = 8 * WIDTH * WORDS * (LENGTH - 1) / LENGTH
    assert flops(found) == pytest.approx(rows * LENGTH * (in_layers + head), rel=0.001)


@pytest.mark.alternating
def test_samples_in_one_row_do_not_see_each_other(speed: Callable[..., Speed]) -> None:
    apart, packed = (speed(packing=packing) for packing in (False, True))
    assert flops(packed) == pytest.approx(flops(apart), rel=0.001)
    assert packed.seconds == pytest.approx(apart.seconds, rel=0.02)


@pytest.mark.alternating
@pytest.mark.rotating
@pytest.mark.parametrize("bits", [4, 8])
def test_layers_that_are_checkpointed_are_computed_again_whatever_computes_them(
    speed: Callable[..., Speed], bits: int
) -> None:
    usual = speed(lora=True, per_device_train_batch_size=16)
    quantized = speed(lora=True, per_device_train_batch_size=16, **{f"load_in_{bits}bit": True})
    assert flops(quantized) == pytest.approx(flops(usual), rel=0.001)
    assert quantized.recomputing > 0.9 * usual.recomputing
    kept = speed(lora=True, load_in_4bit=True, gradient_checkpointing=False)
    assert kept.recomputing == 0


@pytest.mark.alternating
def test_pairs_have_the_tokens_of_both_and_a_reference(speed: Callable[..., Speed]) -> None:
    pairs = speed(trainer="DPOTrainer", lora=True, per_device_train_batch_size=4)
    rows = speed(lora=True, per_device_train_batch_size=8)
    assert pairs.tokens_per_second_per_gpu * pairs.seconds == pytest.approx(8 * LENGTH)
    assert flops(pairs) > 1.3 * flops(rows)


@pytest.mark.alternating
def test_ddp_reduces_gradients_in_the_last_micro_batch(speed: Callable[..., Speed]) -> None:
    def of_one_between(ranks: int) -> float:
        few, many = (speed(ranks=ranks, gradient_accumulation_steps=n).seconds for n in (3, 9))
        return (many - few) / 6

    assert of_one_between(2) == pytest.approx(of_one_between(1), rel=0.01)
    reduced, alone = (speed(ranks=ranks, gradient_accumulation_steps=3) for ranks in (2, 1))
    assert reduced.seconds > alone.seconds


@pytest.mark.alternating
def test_what_is_told_about_the_machine_changes_the_speed(speed: Callable[..., Speed]) -> None:
    many = {"per_device_train_batch_size": 512}  # with few rows the host decides
    usual, slower = speed(**many), speed(machine=Machine(power=350), **many)
    assert slower.seconds > usual.seconds and flops(slower) == pytest.approx(flops(usual))
    assert speed(load_in_4bit=True, lora=True).band != usual.band


def test_the_simulated_device_has_no_machine_around_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(UsageError, match="machine: the device that gpu='cpu' simulates has none"):
        TransformersStep(folder=str(tmp_path)).plan("cpu", "1GiB", machine=Machine(power=300))


class TestKernels:
    """What no operation of torch shows."""

    @pytest.fixture
    def log(self) -> OperationLog:
        return OperationLog("cpu", lambda storage: storage.data_ptr(), lambda: "forward", lambda: 0)

    def ran(self, log: OperationLog, work: Callable[[], Any]) -> dict[str, Operation]:
        with fake_device.heard_by(log):
            work()
        return {operation.name: operation for operation, _ in log.entries}

    def test_a_weight_is_dequantized_in_each_product(self, log: OperationLog) -> None:
        layer = FourBitLinear(torch.nn.Linear(128, 256), torch.bfloat16, double=False)
        inputs = torch.zeros(4, 128, dtype=torch.bfloat16, requires_grad=True)
        self.ran(log, lambda: layer(inputs).sum().backward())
        both = [operation for operation, _ in log.entries if operation.name == "dequantize"]
        weights, blocks = 128 * 256, 128 * 256 // 64
        of_half, of_single = (weights // 2 + 4 * blocks + size * weights for size in (2, 4))
        assert [one.nbytes for one in both] == [of_half, of_single]

    @pytest.mark.parametrize(("bits", "moved"), [(8, 4), (32, 16)])
    def test_an_optimizer_reads_and_writes_its_state(
        self, log: OperationLog, bits: int, moved: int
    ) -> None:
        weight = torch.nn.Parameter(torch.zeros(512, 512))
        weight.grad = torch.zeros_like(weight)
        optimizer = BlockwiseAdamW([{"params": [weight]}], lr=0.1, bits=bits, paged=False)
        found = self.ran(log, optimizer.step)["adamw"]
        assert found.nbytes == pytest.approx((12 + moved) * weight.numel(), rel=0.02)

    def test_ligers_kernels_move_what_they_read_and_write(self, log: OperationLog) -> None:
        rows, width, size = 64, 128, 4
        inputs = torch.zeros(rows, width, requires_grad=True)
        weight = torch.ones(width, requires_grad=True)
        heads = torch.zeros(1, 4, rows, 32, requires_grad=True)
        angles = torch.zeros(1, rows, 32)

        def work() -> None:
            Norm.apply(inputs, weight, False).sum().backward()  # type: ignore[no-untyped-call]
            GatedProduct.apply(inputs, inputs * 2).sum().backward()  # type: ignore[no-untyped-call]
            sum(one.sum() for one in rotated(heads, heads * 2, angles, angles)).backward()
            CrossEntropy.apply(inputs * 2, torch.zeros(rows, dtype=torch.long))  # type: ignore[no-untyped-call]

        found = self.ran(log, work)
        tensor = rows * width * size
        expected = {
            "rms_norm": 2,
            "rms_norm backward": 3,
            "gated product": 3,
            "gated product backward": 5,
            "rotation": 2,
            "cross entropy": 2,
        }
        moved = {name: found[name].nbytes / tensor for name in expected}
        assert moved == pytest.approx(expected, rel=0.04)

    def test_one_tile_stands_for_all(self, log: OperationLog) -> None:
        def work(tokens: int) -> float:
            hidden = torch.zeros(tokens, 16, dtype=torch.bfloat16)
            words = torch.zeros(100, 16, dtype=torch.bfloat16)
            before = len(log.entries)
            with fake_device.heard_by(log), _Noting(log):
                TiledLogProbs.apply(hidden, words, torch.zeros(tokens), torch.bfloat16)  # type: ignore[no-untyped-call]
            return sum(one.flops for one, _ in log.entries[before:])

        assert work(3 * TiledLogProbs.TOKENS) == 3 * work(TiledLogProbs.TOKENS) > 0
        assert work(10) == 2 * 10 * 16 * 100 and log.times == 1


class _Noting(TorchDispatchMode):
    """Tells a log of every operation."""

    def __init__(self, log: OperationLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self._log.note(func, args, kwargs or {}, result)
        return result
