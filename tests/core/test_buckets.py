"""Gradients of replicas are reduced in buckets during backward: the bits are those of DDP, whoever fails."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.helpers.decoder import local_values, same_bits
from tests.helpers.ranks import run_ranks
from tests.helpers.replicas import (
    MODELS,
    ROWS,
    WIDTH,
    Images,
    Layers,
    Recomputed,
    Run,
    partly_frozen,
    rows,
    wrong_bits,
)
from torchtune_adaptive import AdaptiveStep, UsageError
from torchtune_adaptive.core import private
from torchtune_adaptive.core.ranks.buckets import Buckets, _divided


@pytest.mark.ranks
def test_weights_are_those_of_ddp_to_the_bit() -> None:
    assert run_ranks(wrong_bits, 2, [*MODELS]) == [[], []]


def launched_in_backward(kind: str) -> list[tuple[int, int]]:
    """Of each step: buckets that were launched in backward, and all."""
    run = Run(Recomputed if kind == "recomputed" else Layers)
    step, found = run.step.train_step, []
    watch = step.collectives.watch

    def noting(*launches: Any) -> Any:
        found[-1].append(private.backward_running() >= 0)
        return watch(*launches)

    step.collectives.watch = noting  # type: ignore[method-assign]
    for seed in range(4):
        found.append([])
        if kind == "last not known":
            for batch in rows(seed):
                step.forward_backward(batch)
            step.apply()
        else:
            run.take(seed, 2)
    return [(sum(each), len(each)) for each in found]


def farthest_from_one_process() -> float:
    """The largest difference between weights of two ranks, and those of one that has all rows."""
    run, alone = Run(Recomputed), Run(Recomputed, wrap=False)
    for seed in range(4):
        run.take(seed, 2)
        everyones: list[Any] = [None, None]
        dist.all_gather_object(everyones, rows(seed))
        loss, weight = alone.forward(torch.stack(everyones[0] + everyones[1]))
        (loss / weight).backward()
        alone.optimizer.step()
        alone.optimizer.zero_grad()
    both = zip(local_values(run.model), local_values(alone.model), strict=True)
    return max(float((one - other).abs().max()) for one, other in both)


@pytest.mark.ranks
def test_a_layer_that_is_computed_again_in_several_places_gets_all_of_its_gradient() -> None:
    assert max(run_ranks(farthest_from_one_process, 2)) < 1e-6


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["plain", "recomputed", "last not known"])
def test_buckets_are_launched_in_backward_as_soon_as_it_is_known_that_they_are_complete(
    kind: str,
) -> None:
    found = run_ranks(launched_in_backward, 2, kind)
    assert found == [found[0]] * 2
    [*recording, _, last] = [early for early, _ in found[0]]
    [buckets] = {number for _, number in found[0]}
    assert buckets == (2 if kind == "recomputed" else 3)
    assert recording == [0, 0]
    assert last == (buckets if kind == "plain" else 0)


# --- memory runs out ----------------------------------------------------------------------------------


class OutOfMemoryIn:
    """A hook of a parameter that raises once, in a micro-batch of a step."""

    def __init__(self, where: str, parameter: int, micro_batch: int) -> None:
        self.where, self.parameter, self.micro_batch = where, parameter, micro_batch
        self.armed, self.seen = False, 0

    def begin(self, armed: bool) -> None:
        self.armed, self.seen = armed, 0

    def __call__(self, *_: Any) -> None:
        self.seen += 1
        if self.armed and self.seen == self.micro_batch + 1:
            self.armed = False
            raise torch.OutOfMemoryError(f"injected {self.where}")

    def add_to(self, run: Run) -> None:
        """Before the step's own hook, after it, or in forward."""
        parameter = [*run.module.parameters()][self.parameter]
        if self.where == "forward":
            run.module.layers[self.parameter // 2].register_forward_hook(self)  # type: ignore[index, union-attr]
        if self.where == "after":
            run.step  # noqa: B018  # which makes it, and its hooks
        if self.where != "forward":
            parameter.register_post_accumulate_grad_hook(self)


PLACES = [
    ("forward", 0, 0),
    ("forward", 8, 1),
    *(("before", parameter, 1) for parameter in (0, 4, 9)),
    *(("after", parameter, 1) for parameter in (0, 1, 5, 9)),
    ("before", 3, 0),
]


def lost(places: list[tuple[str, int, int]], fails_in: int) -> list[str]:
    """The places where a loss of memory has another result than smaller micro-batches."""
    plain, wrong = Run(), []
    for seed in range(fails_in):
        plain.take_plainly(seed, ROWS // 2)
    plain.take_plainly(fails_in, 1)
    plain.take_plainly(fails_in + 1, 1)
    for number, place in enumerate(places):
        run, hook = Run(), OutOfMemoryIn(*place)
        hook.add_to(run)
        retried = []
        for seed in range(fails_in + 2):
            hook.begin(armed=seed == fails_in and dist.get_rank() == number % 2)
            outcome = run.take(seed, ROWS // 2)
            retried.append(outcome.retried)
        if retried != [0] * fails_in + [1, 0]:
            wrong.append(f"{place}: {retried=}")
        if not same_bits(local_values(run.model), local_values(plain.model)):
            wrong.append(f"{place}: other weights")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("fails_in", [0, 1, 3], ids=["first step", "second", "fourth"])
def test_memory_may_run_out_anywhere_in_backward(fails_in: int) -> None:
    assert run_ranks(lost, 2, PLACES, fails_in, timeout=120) == [[], []]


def lost_in_a_launch(fails_in: int) -> tuple[int, bool]:
    """The retries of a step in which the first rank runs out of memory once it has launched a bucket, and
    whether the bits are those of smaller micro-batches, though the launch still writes in the retry."""
    plain, run = Run(), Run()
    for seed in range(fails_in):
        plain.take_plainly(seed, ROWS // 2)
        run.take(seed, ROWS // 2)
    plain.take_plainly(fails_in, 1)
    run.step  # noqa: B018  # which makes the buckets
    buckets, all_reduce = Buckets.of(run.model), dist.all_reduce  # type: ignore[arg-type]
    on_its_way: list[torch.Tensor] = []

    def launch(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if dist.get_rank() == 0 and any(tensor is bucket for bucket in buckets.tensors):
            for written in on_its_way:
                written.fill_(1e3)
            if not on_its_way:
                on_its_way.append(tensor)
                all_reduce(tensor, *arguments, **named)
                raise torch.OutOfMemoryError("injected after the launch")
        return all_reduce(tensor, *arguments, **named)

    with mock.patch.object(dist, "all_reduce", launch):
        outcome = run.take(fails_in, ROWS // 2)
    return outcome.retried, same_bits(local_values(run.model), local_values(plain.model))


@pytest.mark.ranks
@pytest.mark.parametrize("fails_in", [0, 3], ids=["while recording", "recorded"])
def test_a_launch_that_nobody_can_wait_for_writes_nothing_into_the_next_step(fails_in: int) -> None:
    assert run_ranks(lost_in_a_launch, 2, fails_in) == [(1, True)] * 2


# --- unused parameters --------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        torch.manual_seed(0)
        names = ("always", "on_one_rank", "once", "hidden", "never")
        self.layers = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers["always"](inputs)
        if inputs.flatten()[0] > 1:
            hidden = self.layers["on_one_rank"](hidden)
        if inputs.flatten()[1] > 1:
            hidden = self.layers["once"](hidden)
        hide = self.layers["hidden"]
        loss: torch.Tensor = checkpoint(hide, hidden, use_reentrant=self.reentrant).sum()
        return loss


def of_branches() -> tuple[dict[str, bool | None], dict[str, bool | None]]:
    """Of each layer, whether it has a gradient, and whether that is other than zero: in DDP, and here. On one
    rank the second row uses one layer more, and in the first row another is used on both."""
    given = [torch.ones(2), torch.ones(2)]
    given[0][1] = 2
    given[1][0] = 1 + dist.get_rank()
    found = []
    for ours in (False, True):
        # DDP does not look for unused parameters in what reentrant checkpointing hides.
        model = DistributedDataParallel(Branches(reentrant=ours), find_unused_parameters=True)
        if ours:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            forward = lambda batch, model=model: (model(batch), 2)  # noqa: E731
            step = AdaptiveStep(model, optimizer, forward, optimizer_steps=False)
            for _ in range(3):
                step(given, torch.stack, 1)
        else:
            with model.no_sync():
                model(given[0][None]).backward()
            model(given[1][None]).backward()
        gradients = {name: layer.weight.grad for name, layer in model.module.layers.items()}
        found.append({k: None if g is None else bool(g.any()) for k, g in gradients.items()})
    return found[0], found[1]


@pytest.mark.ranks
def test_unused_parameters_have_the_gradients_that_ddp_gives_them() -> None:
    expected = {"always": True, "on_one_rank": True, "once": True, "hidden": True, "never": None}
    assert run_ranks(of_branches, 2) == [(expected, expected)] * 2


def on_one_rank_only() -> tuple[str, bool]:
    """What is said where ranks use different parameters, and whether weights stay as they were."""
    run = Run()
    run.take(0, 2)
    before = local_values(run.model)
    if dist.get_rank() == 1:
        run.module.layers = run.module.layers[1:]  # type: ignore[index]
    with pytest.raises(UsageError) as refused:
        run.take(1, 2)
    after = [p.detach().clone() for p in run.step.train_step._parameters]
    return str(refused.value), same_bits(before, after)


@pytest.mark.ranks
def test_nothing_is_applied_where_ranks_have_gradients_of_different_parameters() -> None:
    for said, same in run_ranks(on_one_rank_only, 2):
        assert "a gradient on one rank and not on another" in said and same


# --- outside of steps ---------------------------------------------------------------------------------


def outside() -> None:
    run = Run()
    names = [*run.model.state_dict()]
    run.take(0, 2)
    hooks = run.step.train_step._reduction._buckets  # type: ignore[attr-defined]
    assert [*run.model.state_dict()] == names
    batch = torch.stack(rows())
    with torch.no_grad():
        expected = run.model(batch)
    assert torch.equal(run.model.eval()(batch), expected)  # with a graph, and without backward
    run.model.train()
    outcome = run.take(1, 2)
    loss, _ = run.forward(batch)
    with pytest.raises(UsageError, match="backward through DistributedDataParallel outside"):
        loss.backward()
    run.optimizer.zero_grad()
    with run.model.no_sync():  # type: ignore[operator]
        run.forward(batch)[0].backward()
    gradient = run.module.layers[0].weight.grad  # type: ignore[index, union-attr]
    assert gradient is not None and gradient.any()
    run.optimizer.zero_grad()
    assert outcome.retried == run.take(2, 2).retried == 0

    # Another step of the same wrapper, and none.
    run._step = None
    run.take(3, 2)
    assert run.step.train_step._reduction._buckets is hooks  # type: ignore[attr-defined]
    run._step = None
    gc.collect()
    with pytest.raises(UsageError, match="outside of a step"):
        run.forward(batch)[0].backward()
    run.optimizer.zero_grad()

    # Another wrapper: the module is as it was before, and so is DDP.
    plain = Run()
    plain.module.load_state_dict(run.module.state_dict())
    run.model = hooks = None  # type: ignore[assignment]
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in run.module.parameters())  # type: ignore[attr-defined]
    run.model = DistributedDataParallel(run.module)
    for each in (run, plain):
        each.optimizer = torch.optim.SGD(each.module.parameters(), lr=0.5)
        each.take_plainly(4, 2)
    assert same_bits(local_values(run.model), local_values(plain.model))


@pytest.mark.ranks
def test_outside_of_steps_the_wrapper_runs_and_backward_is_refused() -> None:
    run_ranks(outside, 2)


def trainable_changes() -> int:
    """The buckets' bytes, where a second step trains more."""
    run = Run(partly_frozen)
    run.take(0, 2)
    run.module.requires_grad_(True)
    run._step = None
    run.take(1, 2)
    plain = Run(partly_frozen)
    plain.take_plainly(0, 2)
    plain.module.requires_grad_(True)
    plain.model = DistributedDataParallel(plain.module)
    plain.take_plainly(1, 2)
    assert same_bits(local_values(run.model), local_values(plain.model))
    return sum(tensor.nbytes for tensor in run.step.train_step.buckets)


@pytest.mark.ranks
def test_a_step_that_trains_other_parameters_has_other_buckets() -> None:
    every = 5 * 4 * (WIDTH * WIDTH + WIDTH)
    assert run_ranks(trainable_changes, 2) == [every] * 2


# --- one process --------------------------------------------------------------------------------------


def test_a_bucket_has_one_dtype_and_they_come_as_backward_completes_them() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    parameters = [nn.Parameter(torch.zeros(256, 1024, dtype=kind)) for kind in kinds]
    assert _divided(parameters, 1 << 20) == [[4], [2], [3, 1], [0]]
    assert _divided(parameters, 25 << 20) == [[4], [3, 1], [2, 0]]
    assert _divided(parameters, 1) == [[4], [3], [2], [1], [0]]


def test_gradients_are_laid_out_as_parameters(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 's'}", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(Images())
        buckets = Buckets.of(wrapped)
        strides = [buckets.views[place].stride() for place in range(len(buckets.parameters))]
        assert strides == [parameter.stride() for parameter in wrapped.parameters()]
        used = torch.zeros(sum(parameter.numel() for parameter in wrapped.parameters()))
        assert sum(tensor.numel() for tensor in buckets.tensors) == used.numel()
        for view in buckets.views.values():
            view += 1
        assert all((tensor == 1).all() for tensor in buckets.tensors), "no element twice"
    finally:
        dist.destroy_process_group()
