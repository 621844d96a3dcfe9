"""The library interface in plain loops: memory runs out at every operation; nobody waits, no bit changes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.decoder import local_values, same_bits
from tests.helpers.faults import fail_at_each, record_anew, survivable
from tests.helpers.library import (
    Communicating,
    InContext,
    PointToPoint,
    SentToOne,
    SizedByData,
    SizedOnOne,
    Trained,
    WithExperts,
    collate,
    failing,
    rows_of,
    tiny_model,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import Sample
from torchtune_adaptive import AdaptiveStep, UsageError, find_batch_size, steps_of
from torchtune_adaptive.core.private import launches_of
from torchtune_adaptive.core.ranks.agreement import Ranks
from torchtune_adaptive.core.step.snapshot import Snapshot

pytestmark = [pytest.mark.ranks, pytest.mark.alternating]


def forget_the_sequence(step: AdaptiveStep) -> None:
    """As at the beginning, when ranks agree before each collective."""
    record_anew(step.train_step.collectives)


def fail_in_steps(
    way: str,
    recording: bool,
    sample: Sample,
    settings: dict[str, Any],
    only_collectives: bool = False,
) -> Counter[str]:
    """Fail at operations of a step of two rows, on one rank after the other; it is retried with one row.

    Args:
        way: how the model is spread over the ranks.
        recording: whether the ranks agree before each collective.
        sample: of operations.
        settings: of the step.
        only_collectives: whether those are all.
    """
    run, memory = failing(way, max_grad_norm=1.0, **settings)
    step, ranks = run.step, run.step.ranks
    rows = rows_of(2, seed=ranks.rank)
    for number in range(3, 0, -1):  # other data than later, of the same shape
        step(rows_of(2, seed=10 * number + ranks.rank), collate, 2)
    snapshot = Snapshot(run.model, [run.optimizer], torch.device("cpu"))
    step(rows, collate, 1)
    expected = local_values(run.model)
    snapshot.restore()
    last, collectives = survivable(memory, step.train_step, lambda: step(rows, collate, 2))
    snapshot.restore()
    every = collectives if only_collectives else range(1, last + 1)
    operations = [every[number - 1] for number in sample.of(len(every))]
    counts: Counter[str] = Counter()
    for _, _, failure in fail_at_each(operations, memory, ranks):
        step._begin(2)
        if recording:
            forget_the_sequence(step)
        with failure:
            outcome = step(rows, collate, 2)
        counts["tried"] += 1
        counts["retried"] += outcome.retried
        counts["wrong"] += not same_bits(local_values(run.model), expected)
        snapshot.restore()
    return counts


WAYS = {
    "alone": ("alone", 1, {}),
    "FSDP on 2 ranks": ("fsdp", 2, {}),
    "FSDP on 4 ranks": ("fsdp", 4, {}),
    "FSDP of each part": ("parts", 2, {}),
    "FSDP, a frozen weight on each rank": ("whole", 2, {}),
    "HSDP on 2 x 2 ranks": ("hsdp", 4, {}),
    "HSDP, reducing in float16": ("hsdp", 4, {"compute_in": torch.float16}),
    "DDP on 2 ranks": ("ddp", 2, {}),
    "DDP on 4 ranks": ("ddp", 4, {}),
    "DDP, measuring noise": ("ddp", 2, {"measure_noise": True}),
    "FSDP, compiled": ("fsdp", 2, {"compiled": "aot_eager"}),
    "FSDP, communicating": ("fsdp", 2, {"kind": Communicating}),
    "FSDP, communicating, in parts of rows": ("fsdp", 2, {"kind": InContext}),
    "HSDP, communicating": ("hsdp", 4, {"kind": Communicating}),
    "DDP, communicating": ("ddp", 2, {"kind": Communicating}),
    "FSDP, sizes from data": ("fsdp", 2, {"kind": SizedByData}),
    "FSDP, sizes from data on one rank": ("fsdp", 2, {"kind": SizedOnOne}),
    "FSDP, experts": ("fsdp", 2, {"kind": WithExperts}),
    "FSDP, sizes from data, in parts of rows": ("fsdp", 2, {"kind": SentToOne}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["alone", "fsdp"])
def test_compiled_by_inductor(way: str, sample: Sample) -> None:
    settings = {"compiled": "inductor"}
    ranks = 1 if way == "alone" else 2
    sample = sample.every(exhaustive=13, quick=13)
    counts = run_ranks(fail_in_steps, ranks, way, False, sample, settings)
    for count in counts:
        assert count["retried"] == count["tried"] >= 1
        assert count["wrong"] == 0


@pytest.mark.rotating(5)
@pytest.mark.parametrize("recording", [False, True], ids=["recorded", "while recording"])
@pytest.mark.parametrize(("way", "ranks", "settings"), WAYS.values(), ids=WAYS)
def test_memory_runs_out_at_every_operation(
    way: str, ranks: int, settings: dict[str, Any], recording: bool, sample: Sample
) -> None:
    timeout = 280 if sample.exhaustive else 60
    counts = run_ranks(fail_in_steps, ranks, way, recording, sample, settings, timeout=timeout)
    for count in counts:
        assert count["retried"] == count["tried"] >= 20 // sample.stride
        assert count["wrong"] == 0


@pytest.mark.rotating(2)
@pytest.mark.parametrize("recording", [False, True], ids=["recorded", "while recording"])
@pytest.mark.parametrize(("way", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_memory_runs_out_before_and_after_the_launch_of_each_collective(
    way: str, ranks: int, recording: bool, sample: Sample
) -> None:
    """Whether the rank has launched a collective decides whether the others wait for it."""
    sample = sample.every(exhaustive=1, quick=5)
    counts = run_ranks(fail_in_steps, ranks, way, recording, sample, {}, True)
    launches = {"fsdp": 4 + 2, "hsdp": 4 + 2 + 2}[way]  # gather each layer twice, reduce it
    for count in counts:
        assert count["retried"] == count["tried"] == len(sample.of(2 * launches))
        assert count["wrong"] == 0


def exchanges_in_a_step(kind: type[Trained]) -> int:
    """The number of exchanges on the host in a step of 3 micro-batches whose collectives are known."""
    run = kind("fsdp")
    for _ in range(4):
        run.step(rows_of(6), collate, 2)
    ranks, counts = run.step.ranks, Counter[str]()
    spread = ranks.spread

    def counted(number: int) -> tuple[int, int]:
        counts["exchanges"] += 1
        return spread(number)

    ranks.spread = counted  # type: ignore[method-assign]
    run.step(rows_of(6), collate, 2)
    return counts["exchanges"]


def test_a_step_whose_ranks_are_known_to_have_one_shape_asks_nobody_for_it() -> None:
    of_arguments = run_ranks(exchanges_in_a_step, 2, Trained)[0]
    assert run_ranks(exchanges_in_a_step, 2, InContext) == [of_arguments] * 2
    assert run_ranks(exchanges_in_a_step, 2, Communicating) == [of_arguments + 3] * 2


def evaluate_between_steps(way: str) -> list[Any]:
    """As loops do before, between and after steps; then fail. Gives losses, and what a search finds."""
    run, memory = failing(way)

    def evaluate() -> float:
        run.model.eval()
        with torch.no_grad():
            loss, weight = run.forward(collate(rows_of(4)))
        run.model.train()
        return float(loss) / weight

    seen: list[Any] = []
    for number in range(8):
        seen.append(evaluate())
        here = number >= 4 and run.step.ranks.rank == number % run.step.ranks.size
        with memory.fail_at(5 * (number - 3) if here else None):
            outcome = run.step(rows_of(4), collate, 4)
        assert bool(outcome.retried) == (number >= 4)
        run.step._begin(4)
        assert run.step.train_step.collectives._sequence.certain == (number > 0)
        seen.append(outcome.loss)
    return seen


@pytest.mark.parametrize("way", ["fsdp", "hsdp"])
def test_evaluation_between_steps_does_not_disturb_them(way: str) -> None:
    [seen, *others] = run_ranks(evaluate_between_steps, 4, way)
    assert others == [seen] * 3
    assert seen[::2] == pytest.approx(
        seen[1::2], rel=1e-5
    )  # before each step, the loss that it reports


def made_after_evaluation() -> int:
    """After a forward pass without gradients, the root's parameters are whole, and not the optimizer's."""
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters())
    with torch.no_grad():
        model(torch.zeros(1, 4))
    sums = lambda batch: (model(batch[0]).sum(), len(batch[0]))  # noqa: E731
    return AdaptiveStep(model, optimizer, sums)(rows_of(4), collate, 2).weight


def test_a_step_may_be_made_after_evaluation() -> None:
    assert run_ranks(made_after_evaluation, 2) == [8, 8]


def search_and_train(way: str, compiled: str | None) -> list[Any]:
    """Search; train two steps, of which the second is asked to be far too large."""
    run = Trained(way, layers=4, width=64, memory_limit="2MiB", compiled=compiled)
    assert run.step.compiled == (compiled is not None)
    before = local_values(run.model)
    size = find_batch_size(run.step, lambda rows: collate(rows_of(rows, width=64)), ceiling=1 << 12)
    assert same_bits(local_values(run.model), before)
    data = rows_of(8 * size * run.step.ranks.size, width=64)
    outcomes = [
        run.step(rows, collate, micro_batch)
        for rows, micro_batch in zip(steps_of(data, 4 * size), (size, 4 * size), strict=True)
    ]
    again = Trained(way, layers=4, width=64, memory_limit="2MiB", compiled=compiled)
    undisturbed = [again.step(rows, collate, size) for rows in steps_of(data, 4 * size)]
    assert same_bits(local_values(run.model), local_values(again.model))
    assert [o.loss for o in outcomes] == [o.loss for o in undisturbed]
    return [int(size), [trial.fits for trial in size.trials], outcomes[1].retried]


def search_and_log(way: str) -> list[str]:
    """The lines of a search on this rank."""
    run, lines = Trained(way, memory_limit="1MiB"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchtune_adaptive")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    find_batch_size(run.step, lambda rows: collate(rows_of(rows)), ceiling=4)
    return lines


def test_the_lines_of_a_search_are_logged_once() -> None:
    first, second = run_ranks(search_and_log, 2, "ddp")
    assert [line.split(":")[0] for line in first] == [f"micro-batch {n}" for n in (1, 2, 4, 4)]
    assert second == []


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("way", "ranks", "compiled"),
    [
        ("alone", 1, None),
        ("fsdp", 2, None),
        ("parts", 2, None),
        ("hsdp", 4, None),
        ("ddp", 2, None),
        ("fsdp", 2, "aot_eager"),
    ],
)
def test_search_then_train(way: str, ranks: int, compiled: str | None) -> None:
    found = run_ranks(search_and_train, ranks, way, compiled)
    size, fits, retried = found[0]
    assert found == [found[0]] * ranks
    assert size >= 64 and any(fits) and not all(fits)
    assert retried == 2


def refusals() -> dict[str, str]:
    """What is said about models that are spread in other ways, and about ranks that do not do the same."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    two = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))

    def columns() -> nn.Module:
        return parallelize_module(tiny_model("alone"), two["tp"], {"0.0": ColwiseParallel()})

    def partly() -> nn.Module:
        model = tiny_model("alone")
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        return model

    def ignoring() -> nn.Module:
        model = tiny_model("alone")
        return fully_shard(model, mesh=mesh, ignored_params={next(model.parameters())})

    def divided() -> nn.Module:
        model = tiny_model("fsdp")
        model[0].set_gradient_divide_factor(1.0)  # type: ignore[index, operator]
        return model

    def apart() -> nn.Module:
        model = tiny_model("fsdp")
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        return model

    def partly_reduced() -> nn.Module:
        model = tiny_model("hsdp")
        model.set_requires_all_reduce(False)  # type: ignore[operator]
        return model

    def reduced_by_hook() -> nn.Module:
        model = tiny_model("fsdp")
        model[0].set_all_reduce_hook(print)  # type: ignore[index, operator]
        return model

    def gathered_by_the_user() -> nn.Module:
        model = tiny_model("fsdp")
        model[1].set_custom_all_gather(print)  # type: ignore[index, operator]
        return model

    def with_buffers() -> nn.Module:
        return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    def hooked() -> nn.Module:
        model = tiny_model("ddp")
        model.register_comm_hook(None, allreduce_hook)  # type: ignore[operator]
        return model

    models = {
        "not spread": lambda: tiny_model("alone"),
        "tensor parallel": columns,
        "on a part of the ranks": lambda: fully_shard(tiny_model("alone"), mesh=two["dp"]),
        "in parts": partly,
        "ignored parameters": ignoring,
        "divide factor": divided,
        "gradients apart": apart,
        "replicas apart": partly_reduced,
        "all-reduce by hook": reduced_by_hook,
        "gathered by the user": gathered_by_the_user,
        "DDP with buffers": with_buffers,
        "DDP with a hook": hooked,
    }
    said = {}
    for name, make in models.items():
        model = make()
        optimizer = torch.optim.SGD(model.parameters())
        try:
            AdaptiveStep(model, optimizer, lambda batch: (batch, 1))
        except UsageError as refused:
            said[name] = str(refused)
    for name, settings in (
        ("compiled", {"compiled": "aot_eager"}),
        ("noise", {"measure_noise": True}),
    ):
        with pytest.raises(UsageError) as refused:
            InContext("fsdp", **settings)
        said[f"{name}, in parts of rows"] = str(refused.value)
    with pytest.raises(UsageError) as refused:
        WithExperts("fsdp", measure_noise=True)
    said["noise, with experts"] = str(refused.value)
    plan = {"0.0": ColwiseParallel(output_layouts=Replicate())}
    run = Trained("", model=parallelize_module(tiny_model("alone"), mesh, plan))
    run.model.get_parameter("1.0.bias").register_post_accumulate_grad_hook(_reduce_gradient)
    with pytest.raises(UsageError) as refused:
        run.step(rows_of(2), collate, 2)
    said["gradients by hook"] = str(refused.value)
    run = Communicating("fsdp", compiled="aot_eager")
    with pytest.raises(UsageError) as refused:
        run.step(rows_of(2), collate, 2)
    said["compiled, communicates"] = str(refused.value)
    run = PointToPoint("fsdp")
    run.step(rows_of(2), collate, 2)  # the group has counted something
    with pytest.raises(UsageError) as refused:
        run.step(rows_of(2), collate, 2)
    said["point to point"] = str(refused.value)
    run = Trained("fsdp")
    with pytest.raises(UsageError) as refused:
        run.step(rows_of(4), collate, 2 + dist.get_rank() // 2)
    said["size"] = str(refused.value)
    with pytest.raises(UsageError) as refused:
        run.step(rows_of(4), collate, 4, groups=[[4], [1, 3]][dist.get_rank() % 2])
    said["groups"] = str(refused.value)
    if dist.get_rank() == 1:
        with pytest.raises(UsageError, match="size: 0 must be"):
            run.step(rows_of(4), collate, 0)
    else:
        with pytest.raises(UsageError, match="another rank was called with arguments"):
            run.step(rows_of(4), collate, 2)
    run = Trained("ddp")
    if dist.get_rank() == 0:
        run.forward = _without_the_first_layer(run)  # type: ignore[method-assign]
        run.step = AdaptiveStep(run.model, run.optimizer, run.forward)
    else:
        run.step = AdaptiveStep(run.model, run.optimizer, run.forward)
    with pytest.raises(UsageError) as refused:
        run.step(rows_of(2), collate, 2)
    said["gradients"] = str(refused.value)
    return said


def _reduce_gradient(parameter: torch.Tensor) -> None:
    dist.all_reduce(parameter.grad)


class LaunchingUnseen(Trained):
    """A program whose first rank launches something of its own."""

    launch: Callable[[torch.Tensor], Any]

    def forward(self, batch: Any) -> tuple[torch.Tensor, int]:
        if dist.get_rank() == 0:
            self.launch(batch[0])
        return super().forward(batch)


class Launching(LaunchingUnseen, InContext):
    """One whose ranks look at operators from the first step on."""


def _send(rows: torch.Tensor) -> None:
    dist.send(rows, 1)


def _send_in_batch(rows: torch.Tensor) -> None:
    dist.batch_isend_irecv([dist.P2POp(dist.isend, rows, 1)])


def _sum_in_memory_of_others(rows: torch.Tensor) -> None:
    torch.ops.symm_mem.one_shot_all_reduce(rows, "sum", "0")


def _multiply_what_is_gathered(rows: torch.Tensor) -> None:
    torch.ops.symm_mem.fused_all_gather_matmul(rows, [rows.T], 0, "0")


def _send_to_experts_of_torch(rows: torch.Tensor) -> None:
    splits = torch.zeros(2, dtype=torch.int64)
    torch.ops.symm_mem.all_to_all_vdev(rows, rows, splits, splits, "0")


def _send_to_experts(rows: torch.Tensor) -> None:
    torch.ops.deepep.dispatch(rows)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str, str]] = {
    "point to point": (_send, "c10d.send", "as in a pipeline"),
    "point to point, in a batch": (_send_in_batch, "c10d.send", "as in a pipeline"),
    "symmetric memory": (_sum_in_memory_of_others, "symm_mem.one_shot", "memory of other ranks"),
    "asynchronous tensor parallelism": (
        _multiply_what_is_gathered,
        "symm_mem.fused_all_gather_matmul",
        "memory of other ranks",
    ),
    "one-sided experts of torch": (
        _send_to_experts_of_torch,
        "symm_mem.all_to_all_vdev",
        "memory of other ranks",
    ),
    "one-sided experts": (_send_to_experts, "deepep.dispatch", "memory of other ranks"),
}


def refused_in_the_first_step(name: str) -> str:
    kind: type[Trained] = Launching
    if name == "one-sided experts":
        # As torchtitan defines it. No group counts it, and nothing else makes ranks look at operators.
        operator = torch.library.Library("deepep", "DEF")
        operator.define("dispatch(Tensor rows) -> Tensor")
        operator.impl("dispatch", torch.clone, "CPU")
        kind = LaunchingUnseen
    run = kind("fsdp")
    run.launch = REFUSED[name][0]  # type: ignore[attr-defined]
    with pytest.raises(UsageError) as refused:
        run.step(rows_of(2), collate, 2)
    return str(refused.value)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rank_could_complete_is_refused_in_the_first_step(name: str) -> None:
    _, operator, why = REFUSED[name]
    said = run_ranks(refused_in_the_first_step, 2, name)
    assert said == [said[0]] * 2
    assert operator in said[0] and why in said[0]


def log_of_sizes_from_data(kind: type[Trained]) -> tuple[list[str], list[int], int]:
    """What is logged in steps whose sizes follow data; how often the ranks exchange numbers in each, and how
    many collectives the last one launches."""
    said: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    logging.getLogger("torchtune_adaptive.core").addHandler(Keeping())
    run, exchanges, begin = kind("fsdp"), 0, Ranks.begin_spread

    def counted(ranks: Ranks, number: int) -> Callable[[], tuple[int, int]]:
        nonlocal exchanges
        exchanges += ranks.size > 1
        return begin(ranks, number)

    made = []
    with mock.patch.object(Ranks, "begin_spread", counted):
        for seed in range(5):
            exchanges, before = 0, launches_of(dist.group.WORLD) or 0
            run.step(rows_of(4, 2 * seed + dist.get_rank()), collate, 4)
            made.append(exchanges)
    return said, made, (launches_of(dist.group.WORLD) or 0) - before


VOTES = {SizedByData: 1, SizedOnOne: 1, WithExperts: 4}
"""The all-to-alls of a micro-batch whose sizes follow data."""


@pytest.mark.parametrize("kind", [*VOTES, SentToOne])
def test_ranks_vote_where_sizes_follow_data_and_say_what_it_costs(kind: type[Trained]) -> None:
    (said, made, launched), (nothing, others, _) = run_ranks(log_of_sizes_from_data, 2, kind)
    assert made == others
    assert nothing == [] and len(said) == 1
    # Once more, they ask for a new shape, or agree at the end; and before the step.
    asked = VOTES.get(kind, launched - 1) + 1
    assert made[-1] == asked + 1 and asked <= launched
    assert "is told the sizes of its parts" in said[0]
    assert ("before each such collective" if kind in VOTES else "before each collective") in said[0]


class Mishap(Exception):
    """An exception of the user's own."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Mishap


MISHAPS_IN = ("collate", "forward", "backward")


class Clumsy(Trained):
    """A program whose functions raise where they are told to: ``collate``, ``forward`` or ``backward``."""

    fails_in: tuple[str, int] | None = None
    """The function, and the micro-batch, counted from 0."""

    def collate(self, rows: list[Any]) -> Any:
        self.number += 1
        self._fail("collate")
        return collate(rows)

    def forward(self, batch: Any) -> tuple[torch.Tensor, int]:
        loss, weight = super().forward(batch)
        self._fail("forward")
        return FailsInBackward.apply(loss) if self._is_due("backward") else loss, weight

    def _fail(self, where: str) -> None:
        if self._is_due(where):
            raise Mishap

    def _is_due(self, where: str) -> bool:
        return self.fails_in == (where, self.number)

    def take_step(self, seed: int, fails_in: tuple[str, int] | None = None) -> Any:
        self.number, self.fails_in = -1, fails_in
        outcome = self.step(rows_of(6, seed), self.collate, 2)
        return outcome.loss, outcome.weight, [p.tolist() for p in local_values(self.model)]

    def search(self, fails_in: tuple[str, int] | None = None) -> int:
        self.number, self.fails_in = -1, fails_in
        made = lambda rows: self.collate(rows_of(rows))  # noqa: E731
        return find_batch_size(self.step, made, ceiling=8)


def after_mishaps(way: str, recording: bool) -> list[str]:
    """Mishaps after which a step is not the same as without them."""
    wrong = []
    run, undisturbed = (Clumsy(way, memory_limit="1MiB") for _ in range(2))
    for searching, where, number in product((False, True), MISHAPS_IN, (0, 1)):
        for each in (run, undisturbed):
            each.take_step(0)
            if recording:
                forget_the_sequence(each.step)
        with pytest.raises(Mishap):
            (run.search if searching else partial(run.take_step, 1))((where, number))
        for seed in (2, 3):
            if run.take_step(seed) != undisturbed.take_step(seed):
                wrong.append(f"{searching=} {where} {number}")
    return wrong


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("way", "ranks"), [("alone", 1), ("fsdp", 2), ("parts", 2), ("hsdp", 4), ("ddp", 2)]
)
@pytest.mark.parametrize("recording", [False, True], ids=["recorded", "while recording"])
def test_nothing_stays_of_a_step_that_the_users_own_exception_ends(
    recording: bool, way: str, ranks: int
) -> None:
    assert run_ranks(after_mishaps, ranks, way, recording) == [[]] * ranks


def _without_the_first_layer(run: Trained) -> Any:
    def forward(batch: Any) -> tuple[torch.Tensor, int]:
        return run.model.module[1](batch[0]).sum(), 1  # type: ignore[operator, index]

    return forward


def test_what_cannot_work_is_refused_on_every_rank() -> None:
    said = run_ranks(refusals, 4)
    assert said == [said[0]] * 4
    expected = {
        "not spread": "nothing reduces its gradients",
        "tensor parallel": "is spread over 2 of 4 ranks",
        "point to point": "each rank has a sequence of its own, as in a pipeline",
        "compiled, in parts of rows": "Do not compile",
        "noise, in parts of rows": "gradient noise is not measured on such a mesh",
        "compiled, communicates": "Compile nothing that communicates",
        "on a part of the ranks": "is spread over 2 of 4 ranks",
        "in parts": "is not sharded, so nothing reduces its gradient",
        "ignored parameters": "is not sharded",
        "divide factor": "gradients are divided by 1.0 and 4 in modules",
        "noise, with experts": "its experts have gradients of the rows of other ranks",
        "gradients by hook": "a hook reduces the gradient of 1.0.bias over ranks after each",
        "gradients apart": "set_requires_gradient_sync(False) was called",
        "replicas apart": "set_requires_all_reduce(False) was called",
        "all-reduce by hook": "set_all_reduce_hook was called",
        "gathered by the user": "set_custom_all_gather was called",
        "DDP with buffers": "Pass broadcast_buffers=False",
        "groups": "groups: [1, 3] on one rank and [4] on another",
        "DDP with a hook": "a communication hook would be bypassed",
        "size": "size: 2 on one rank and 3 on another",
        "gradients": "a gradient on one rank and not on another",
    }
    assert set(expected) == set(said[0])
    for name, part in expected.items():
        assert part in said[0][name], said[0][name]
