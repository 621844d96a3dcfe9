"""Packed rows: their mask is made in the step, and attention is compiled for as many sizes as there are."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.compiler.config
from omegaconf import OmegaConf
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
from torchtune.data import padded_collate_packed
from torchtune.modules import attention_utils

from tests.helpers.decoder import adamw, local_values, same_bits
from tests.helpers.faults import FailingMemory
from tests.helpers.models import tiny_llama, train_step
from tests.helpers.packed import flex_attention, packs, room_for_masks_of
from tests.helpers.ranks import Alone
from torchtune_adaptive.core.device.simulated import SimulatedMemory
from torchtune_adaptive.core.search.probe import Probe
from torchtune_adaptive.core.search.strategies import find_largest
from torchtune_adaptive.core.sizes.recovery import Recovery
from torchtune_adaptive.core.step.phase import Phase
from torchtune_adaptive.core.step.retry import StepRunner
from torchtune_adaptive.core.step.train_step import TrainStep
from torchtune_adaptive.recipe.data.packed import ImaginedMask, PackedMask, collate_packed
from torchtune_adaptive.recipe.search.prober import Prober
from torchtune_adaptive.recipe.settings.asked import Asked
from torchtune_adaptive.recipe.setup.flex_attention import (
    compile_for_every_size,
    compiles,
    has_flex_attention,
)

CPU = torch.device("cpu")
SIZES = (1, 2, 4, 8, 16)


def new_step() -> TrainStep:
    model = tiny_llama(sharded=False)
    gc.freeze()  # or each collection would walk through all that was imported
    return train_step(model, [adamw(model)], memory=FailingMemory(), ranks=Alone())


def probe_of(step: TrainStep) -> Probe:
    return Probe(
        step=step,
        accumulation=lambda size: 1,
        headroom=0.0,
        entering=lambda phase: None,
    )


def worst(rows: int) -> dict[str, Any]:
    return collate_packed(packs(1) * rows)


def test_a_batch_is_torchtunes_once_it_is_on_the_device() -> None:
    rows = packs(5)
    ours, theirs = collate_packed(rows), padded_collate_packed(rows)
    assert [*ours] == [*theirs]
    on_device = {name: value.to(CPU) for name, value in ours.items()}
    assert all(torch.equal(on_device[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_an_imagined_mask_takes_what_the_largest_real_one_takes(rows: int) -> None:
    def peak(mask: PackedMask | ImaginedMask) -> tuple[int, int]:
        memory = SimulatedMemory(1 << 30)
        memory.watch()
        with memory.running():
            made = mask.to(CPU)
        return memory.usage().peak_bytes // 64**2, made.nbytes  # without a few numbers

    imagined = peak(ImaginedMask(rows, 64))
    assert peak(PackedMask([[64]] * rows)) == imagined
    assert peak(PackedMask([[1, 30, 33]] * rows)) <= imagined


def test_workers_make_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("create_block_causal_mask", "packed_block_causal_mask"):
        monkeypatch.setattr(attention_utils, name, None)
    rows: Any = packs(64)
    loader = DataLoader(rows, batch_size=64, collate_fn=collate_packed, num_workers=1)
    [batch] = loader
    assert batch["mask"] == collate_packed(rows)["mask"]


def test_a_size_whose_mask_does_not_fit_is_a_trial_that_failed() -> None:
    step = new_step()
    probe = probe_of(step)
    with room_for_masks_of(5), probe:
        assert probe.prime(worst).fits
        result = find_largest("bisect", SIZES, partial(probe.trial, batch=worst))
        validating = probe.trial_of(Phase("validation", step, step.sums), 8, worst(8))
    assert [(trial.size, trial.fits) for trial in result.trials] == [
        (1, True),
        (2, True),
        (4, True),
        (8, False),
    ]
    assert result.trials[-1].reports[0].failed_in == "forward"
    assert validating.reports[0].failed_in == "validation"


def trained(fits: int) -> tuple[list[torch.Tensor], int, int]:
    """The weights after two steps of eight rows, the size of the last, and how many were retried."""
    step = new_step()
    runner = StepRunner(step, advice=lambda: "")
    runner.begin(8, Recovery(8, (1, 2, 4, 8), None))
    for number in (1, 2):
        rows = packs(8, seed=number)
        with room_for_masks_of(fits) if number == 2 else nullcontext():
            runner.run(
                lambda size: (
                    collate_packed(rows[start : start + size])  # noqa: B023 - used here only
                    for start in range(0, 8, size)
                ),
                number,
            )
    return local_values(step.model), runner.size, runner.retried_steps


def test_a_step_whose_mask_does_not_fit_is_retried_in_smaller_micro_batches() -> None:
    unharmed, *_ = trained(8)
    weights, size, retried = trained(5)
    assert (size, retried) == (4, 1)
    for one, other in zip(weights, unharmed, strict=True):
        torch.testing.assert_close(one, other)


def test_the_step_makes_a_block_mask_where_attention_is_flex() -> None:
    def weights(seen: list[str]) -> list[torch.Tensor]:
        step = new_step()
        summed_loss = step.objective.summed_loss

        def looked_at(forward: Any, batch: Any, weight: int) -> Any:
            seen.append(type(batch["mask"]).__name__)
            return summed_loss(forward, batch, weight)

        with patch.object(step.objective, "summed_loss", looked_at):
            step.forward_backward(collate_packed(packs(3)))
            assert not step.apply().lost
        return local_values(step.model)

    dense, flex = list[str](), list[str]()
    expected = weights(dense)
    with flex_attention():
        assert same_bits(weights(flex), expected)
    assert (dense, flex) == (["Tensor"], ["BlockMask"])


def test_attention_is_compiled_for_every_size(exhaustive: bool) -> None:
    limit, sizes = (8, 9) if exhaustive else (2, 3)
    with flex_attention(), torch.compiler.config.patch(recompile_limit=limit):
        compile_for_every_size(PACKED)
        step = new_step()
        counters.clear()
        with probe_of(step) as probe:
            for rows in range(1, sizes + 1):
                assert probe.trial(rows, worst).fits
            assert probe.trial_of(Phase("validation", step, step.sums), 2, worst(2)).fits
            # The limit is each thread's own; backward's, on a GPU, compute again what forward has compiled.
            other = Thread(target=step.forward_backward, args=(worst(1),))
            other.start()
            other.join()
        assert counters["frames"] == {"ok": sizes + 1, "total": sizes + 1}


def asking(**config: Any) -> Asked:
    return Asked.of(OmegaConf.create({"device": "cuda", **config}), "full")


PACKED = asking(dataset={"packed": True})
PACKED_VALIDATION = asking(dataset_val={"packed": True})


def test_flex_attention_is_there_on_a_gpu_if_torchtune_has_it() -> None:
    devices = [torch.device("cuda"), torch.device("cpu")]
    assert [has_flex_attention(device) for device in devices] == [False, False]
    with flex_attention():
        assert [has_flex_attention(device) for device in devices] == [True, False]


@pytest.mark.parametrize("asked", [PACKED, PACKED_VALIDATION])
def test_a_rank_that_compiles_attention_is_waited_for(asked: Asked) -> None:
    waited: list[float | None] = []

    def enter(phase: str, patience: float | None) -> None:
        waited.append(patience)

    def try_one_row() -> None:
        step = new_step()
        prober = Prober(step, step.ranks, SimpleNamespace(enter=enter), asked)  # type: ignore[arg-type]
        with prober.probe(lambda size: 1) as probe:
            probe.trial(1, worst)

    try_one_row()
    limit = torch.compiler.config.recompile_limit
    compile_for_every_size(asked)
    assert not compiles(asked) and torch.compiler.config.recompile_limit == limit
    with flex_attention():
        assert compiles(asked)
        try_one_row()
        assert not compiles(asking(dataset={"packed": False}))
    assert waited == [45.0, None]
