"""The library interface: names and signatures, what it imports, and misuse that it refuses in one line."""

from __future__ import annotations

import inspect
import logging
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import torchtune_adaptive
from tests.helpers.library import Trained, collate, failing, rows_of, tiny_model
from torchtune_adaptive import (
    AdaptiveStep,
    NoPrediction,
    TrainingOutOfMemory,
    UsageError,
    find_batch_size,
    steps_of,
)
from torchtune_adaptive.core.step import retry
from torchtune_adaptive.core.step.gradients import LossScale
from torchtune_adaptive.library import model_steps

SIGNATURES = {
    "AdaptiveStep": "(model, optimizer, forward, *, shares=False, optimizer_steps=True, max_grad_norm=None, "
    "scaler=None, memory_limit=None, grow_back_after=100, sync_each_batch=True, measure_noise=False, "
    "activation_checkpointing=None, "
    "restore=None, frozen=(), "
    "compiled=None, dropout='torch', seed=0, sequences=1, context_mesh=None, wait_for_memory=0.0, "
    "timeout=None)",
    "AdaptiveStep.__call__": "(self, rows, collate_fn, size, lengths=None, groups=None, numbers=None)",
    "AdaptiveStep.collective": "(self, launch, *arguments, **named)",
    "AdaptiveStep.forward_only": "(self, work, *, name=None, worst_case=None, gathers=False)",
    "AdaptiveStep.state_dict": "(self)",
    "AdaptiveStep.load_state_dict": "(self, state)",
    "ForwardOnly.__call__": "(self, rows, collate_fn, size, lengths=None, groups=None)",
    "ForwardOnly.state_dict": "(self)",
    "ForwardOnly.load_state_dict": "(self, state)",
    "find_batch_size": "(step, worst_case, *, phase=None, ceiling=16384, accumulation=1, "
    "rounding='power_of_two', search='extrapolate', headroom=0.05)",
    "find_fastest": "(step, worst_case, *, rows, ceiling=None, rounding='power_of_two', "
    "search='extrapolate', headroom=0.05)",
    "LayerCheckpointing": "(layers, switch=None, configured=None)",
    "LayerCheckpointing.set": "(self, checkpointed)",
    "AdaptiveStep.checkpoint_layers": "(self, checkpointed)",
    "plan_batch_size": "(build, *, optimizer, forward, worst_case, gpu='h100-80gb', memory=None, ranks=1, "
    "rows=None, ceiling=16384, accumulation=1, max_grad_norm=None, headroom=0.05, "
    "length=1, machine=None, timeout=600.0)",
    "Machine": "(power=None, links=None, network=None, gpus_in_a_node=None)",
    "Plan": "(largest, rows, peak, parts, usable_bytes, assumptions, speed=None, allocated=0, "
    "with_retries=False, experts=None, unchecked='')",
    "steps_of": "(data, rows=None, *, global_rows=None, epoch=0, shuffle=True, seed=0, start=0, mesh=None)",
    "Steps.state_dict": "(self)",
    "Steps.load_state_dict": "(self, state)",
    "NoiseScale": "(window=100, least_steps=10)",
    "Speed": "(seconds, tokens_per_second_per_gpu, mfu, parts, recomputing, band, "
    "rows_per_second_per_gpu=0.0)",
    "TransformersStep": "(*, folder, trainer='SFTTrainer', ranks=1, **settings)",
    "lr_factor": "(rule, batch, start, noise=None, exponent=0.5)",
    "Outcome": "(loss, weight, gradient_norm, micro_batch, retried, allocation_retries, overflow, noise)",
    "Moment": "(samples, epochs, start, current, lr_factor=1.0, noise=None)",
}
"""The promise: what is here stays; names and parameters with defaults may be added."""


def test_names_and_signatures_are_what_was_promised() -> None:
    classes = {"AdaptiveBatchingError", "BatchSize", "ForwardOnly", "NoPrediction", "NothingFits"}
    classes |= {"RankLost", "Schedule", "Steps", "TrainingOutOfMemory", "UsageError"}
    assert set(torchtune_adaptive.__all__) == classes | {
        name for name in SIGNATURES if "." not in name
    }
    for name, promised in SIGNATURES.items():
        owner: Any = torchtune_adaptive
        for part in name.split("."):
            owner = getattr(owner, part)
        signature = inspect.signature(owner)
        bare = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ]
        assert str(inspect.Signature(bare)) == promised, name


def summed(model: nn.Module) -> Callable[[Any], Any]:
    return lambda batch: (F.mse_loss(model(batch[0]), batch[1], reduction="sum"), batch[1].numel())


class TestMisuse:
    def step(self, model: nn.Module, optimizer: Any = None, **settings: Any) -> AdaptiveStep:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        return AdaptiveStep(model, optimizer, summed(model), **settings)

    def test_optimizer_over_other_parameters(self) -> None:
        other = torch.optim.SGD(tiny_model("alone").parameters())
        with pytest.raises(UsageError, match=r"4 of its 4 parameters are not the model's"):
            self.step(tiny_model("alone"), other)

    def test_parameters_without_an_optimizer(self) -> None:
        model = tiny_model("alone")
        with pytest.raises(UsageError, match=r"1\.0\.weight \(and 1 more\) requires a gradient"):
            self.step(model, torch.optim.SGD(model[0].parameters()))  # type: ignore[index]

    def test_model_on_the_meta_device(self) -> None:
        with pytest.raises(UsageError, match=r"weight is on the meta device"):
            self.step(nn.Linear(2, 2, device="meta"))

    def test_nothing_to_train(self) -> None:
        model = tiny_model("alone")
        optimizer = torch.optim.SGD(model.parameters())
        model.requires_grad_(False)
        with pytest.raises(UsageError, match="nothing to train"):
            self.step(model, optimizer)

    def test_noise_with_a_scaler(self) -> None:
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(UsageError, match="measure_noise"):
            self.step(tiny_model("alone"), measure_noise=True, scaler=scaler)

    def test_cuda_graphs(self) -> None:
        model = tiny_model("alone")
        compiled = torch.compile(lambda batch: (model(batch[0]).sum(), 4), mode="reduce-overhead")
        with pytest.raises(UsageError, match=r"forward: torch\.compile replays it as CUDA graphs"):
            AdaptiveStep(model, torch.optim.SGD(model.parameters()), compiled)

    @pytest.mark.parametrize(
        ("returned", "why"),
        [
            (lambda loss: loss, r"returned a tensor of shape \(4, 4\) .*, but must return two"),
            (lambda loss: None, "returned None, but must return two"),
            (lambda loss: [loss.sum(), 4], "returned a list, but must return two"),
            (lambda loss: (loss, 4), "the loss is a tensor of shape"),
            (lambda loss: (loss.sum().item(), 4), "the loss is -?[0-9.]+, but must be a tensor"),
            (lambda loss: (loss.sum() * 1j, 4), "dtype complex64, but must be .* real"),
            (lambda loss: (loss.sum().detach(), 4), "requires no gradient. .* without detach"),
            *(
                (lambda loss, weight=weight: (loss.sum(), weight), f"the weight is {said}")
                for weight, said in [
                    (-1, "-1"),
                    (2.5, "2.5"),
                    (None, "None"),
                    ("4", "a str"),
                    (True, "True"),
                    (float("nan"), "nan"),
                    (float("inf"), "inf"),
                    ([4], "a list"),
                    (torch.ones(2), "a tensor of shape"),
                    (torch.tensor(1j), "a complex"),
                ]
            ),
        ],
    )
    def test_forward_returns_something_else(self, returned: Any, why: str) -> None:
        model = tiny_model("alone")
        optimizer = torch.optim.SGD(model.parameters())
        step = AdaptiveStep(model, optimizer, lambda batch: returned(model(batch[0])))
        with pytest.raises(UsageError, match=why) as refused:
            step(rows_of(4), collate, 4)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
    def test_where_gradients_are_off(self, off: Any) -> None:
        run = Trained("alone")
        with off(), pytest.raises(UsageError, match=r"Do not take a step inside torch\.no_grad"):
            run.step(rows_of(4), collate, 4)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("forward", value) for value in (3, None)),
            *(("max_grad_norm", value) for value in (-1, 0, math.nan, "x", True)),
            *(("scaler", value) for value in (3, "x")),
            *(("memory_limit", value) for value in ("24 gigs", 0, -1, 2.5, [])),
            *(("grow_back_after", value) for value in (0, -1, 2.5, math.nan)),
            *(("frozen", value) for value in (None, 3, [3], nn.Sequential(nn.Linear(2, 2)))),
            *(("wait_for_memory", value) for value in (-1, math.nan, math.inf, None)),
            *(("timeout", value) for value in (-1, 0, math.nan, math.inf, "x")),
        ],
    )
    def test_an_argument_of_a_step(self, name: str, value: Any) -> None:
        model = tiny_model("alone")
        arguments = {"forward": summed(model), name: value}
        refuses(name, AdaptiveStep, model, torch.optim.SGD(model.parameters()), **arguments)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("step", value) for value in (None, 3)),
            *(("worst_case", value) for value in (None, 3)),
            *(("ceiling", value) for value in (0, -1, 2.5, None, 10**400)),
            *(("accumulation", value) for value in (0, -1, 1.5, "2")),
            *(("rounding", value) for value in ("x", None, [])),
            *(("search", value) for value in ("x", None)),
            *(("headroom", value) for value in (-1, 1, 2, math.nan, "x", None)),
        ],
    )
    def test_an_argument_of_a_search(self, name: str, value: Any) -> None:
        step = Trained("alone", memory_limit="1MiB").step
        batch = lambda rows: collate(rows_of(rows))  # noqa: E731
        refuses(name, find_batch_size, **{"step": step, "worst_case": batch, name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("rows", value) for value in (3, None, range(0), {"tokens": [1, 2]}, iter([1]))),
            *(("collate_fn", value) for value in (3, None)),
            *(("size", value) for value in (0, -1, 2.5, math.nan, None, "4", True)),
            *(("groups", value) for value in (4, [2, 1], [4, 0], [2.0, 2.0], "22", [])),
        ],
    )
    def test_an_argument_of_a_call(self, name: str, value: Any) -> None:
        step = Trained("alone").step
        refuses(name, step, **{"rows": rows_of(4), "collate_fn": collate, "size": 2, name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("rows", value) for value in (0, -1, 2.5, "2", None)),
            *(("epoch", value) for value in (-1, 0.5, None)),
            *(("start", value) for value in (-1, 0.5, None)),
        ],
    )
    def test_an_argument_of_steps(self, name: str, value: Any) -> None:
        refuses(name, steps_of, **{"data": rows_of(8), "rows": 2, name: value})

    def test_a_state_that_is_none(self) -> None:
        with pytest.raises(
            UsageError, match=r"load_state_dict: .* recovery, .* size, steps is miss"
        ):
            Trained("alone").step.load_state_dict({})

    @pytest.mark.parametrize(
        "mean",
        [
            F.mse_loss,
            lambda outputs, targets: (outputs - targets).square().mean(),
            lambda outputs, targets: F.cross_entropy(outputs, targets.argmax(-1)).double(),
            lambda outputs, targets: F.smooth_l1_loss(outputs, targets).reshape(1),
        ],
    )
    def test_forward_returns_a_mean(self, mean: Any) -> None:
        model = tiny_model("alone")
        optimizer = torch.optim.SGD(model.parameters())
        step = AdaptiveStep(model, optimizer, lambda batch: (mean(model(batch[0]), batch[1]), 16))
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(UsageError, match="the loss is a mean, and its weight is 16") as refused:
            step(rows_of(4), collate, 4)
        assert "\n" not in str(refused.value)
        assert all(map(torch.equal, model.parameters(), before))

    @pytest.mark.parametrize(
        ("total", "weight"),
        [
            (lambda outputs, targets: F.mse_loss(outputs, targets) * targets.numel(), 16),
            (lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum").mean(), 16),
            (F.mse_loss, 1),  # one term: the mean over the numbers of one row
        ],
    )
    def test_a_mean_that_is_a_sum(self, total: Any, weight: int) -> None:
        model = tiny_model("alone")
        optimizer = torch.optim.SGD(model.parameters())
        step = AdaptiveStep(
            model, optimizer, lambda batch: (total(model(batch[0]), batch[1]), weight)
        )
        assert step(rows_of(4), collate, 4).weight == weight

    def test_forward_returns_a_mean_that_only_the_search_sees(self) -> None:
        model = tiny_model("alone")
        optimizer = torch.optim.SGD(model.parameters())
        half = lambda batch: (F.mse_loss(model(batch[0]), batch[1]) / 2, batch[1].numel())  # noqa: E731
        step = AdaptiveStep(model, optimizer, half, memory_limit="1MiB")
        with pytest.raises(UsageError, match="so it is a mean"):
            find_batch_size(step, lambda rows: collate(rows_of(rows)))

    def test_too_few_rows(self) -> None:
        run = Trained("alone", memory_limit="1MiB")
        with pytest.raises(UsageError, match=r"worst_case: worst_case\(\d+\) has 24 numbers"):
            find_batch_size(run.step, lambda rows: collate(rows_of(min(rows, 3))))

    def test_a_cpu_without_a_limit(self) -> None:
        with pytest.raises(UsageError, match="memory_limit: a CPU has no memory of its own"):
            find_batch_size(Trained("alone").step, lambda rows: collate(rows_of(rows)))

    def test_no_rows(self) -> None:
        run = Trained("alone")
        with pytest.raises(UsageError, match="at least one on every rank"):
            run.step([], collate, 1)
        run.step(rows_of(1), collate, 1)
        with pytest.raises(UsageError, match="at least one on every rank"):
            run.step([], collate, 1)
        with pytest.raises(UsageError, match="16 in a step on each rank, and the data has 8"):
            next(steps_of(rows_of(8), 16))


def refuses(name: str, function: Any, *given: Any, **named: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}: ") as refused:
        function(*given, **named)
    assert "\n" not in str(refused.value)


def test_steps_go_on_in_the_middle_of_an_epoch() -> None:
    whole = list(steps_of(range(10), 3, epoch=1))
    assert sorted({row for rows in whole for row in rows}) != list(range(9))  # shuffled
    assert [len(rows) for rows in whole] == [3, 3, 3]
    assert list(steps_of(range(10), 3, epoch=1, start=3)) == whole[1:]


def test_a_micro_batch_has_rows_of_one_group() -> None:
    run, plain = Trained("alone"), Trained("alone")
    rows, made = rows_of(9), []

    def collated(some: list[Any]) -> Any:
        made.append(len(some))
        return collate(some)

    run.step(rows, collated, 4, groups=[6, 1, 2])
    plain.step(rows, collate, 9)
    assert made == [4, 2, 1, 2]
    for one, other in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    score = run.step.forward_only(lambda batch: [len(batch[0])] * len(batch[0]), name="score")
    assert score(rows, collate, 4, groups=[6, 3]) == [4] * 4 + [2] * 2 + [3] * 3
    with pytest.raises(UsageError, match=r"groups: not with lengths"):
        run.step(rows, collate, 4, lengths=[1] * 9, groups=[9])


def test_a_step_is_plain_accumulation() -> None:
    run, plain = Trained("alone", max_grad_norm=0.5), Trained("alone")
    outcome = run.step(rows_of(6), collate, 4)
    for part in (rows_of(6)[:4], rows_of(6)[4:]):
        loss, _ = plain.forward(collate(part))
        (loss / 24).backward()
    norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
    plain.optimizer.step()
    assert outcome.weight == 24 and outcome.micro_batch == 4
    assert outcome.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    for ours, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_loss_scaling_changes_no_step_and_skips_an_overflow() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    run, plain = Trained("alone", scaler=scaler), Trained("alone")
    for seed in (0, 1):
        assert not run.step(rows_of(4, seed), collate, 2).overflow
        plain.step(rows_of(4, seed), collate, 2)
    weights = [parameter.detach().clone() for parameter in run.model.parameters()]
    for ours, theirs in zip(weights, plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert scaler.get_scale() == 2.0**11  # grown after two steps
    infinite = [(inputs, targets * float("inf")) for inputs, targets in rows_of(2)]
    assert run.step(infinite, collate, 2).overflow
    assert scaler.get_scale() == 2.0**10
    assert all(map(torch.equal, run.model.parameters(), weights))
    assert LossScale(scaler).factor == 2.0**10


def test_a_step_continues_from_its_state() -> None:
    run, again = Trained("alone", grow_back_after=2), Trained("alone", grow_back_after=2)
    run.step(rows_of(4), collate, 4)
    run.step._runner.recovery.shrink()  # type: ignore[union-attr]
    again.step.load_state_dict(run.step.state_dict())
    sizes = [again.step(rows_of(4), collate, 4).micro_batch for _ in range(3)]
    assert sizes == [2, 2, 4] and again.step.steps == 4


def test_rows_from_a_data_loader_that_does_not_collate() -> None:
    data, run, again = rows_of(8), Trained("alone"), Trained("alone")
    loader = DataLoader(data, batch_size=4, drop_last=True, collate_fn=list)  # type: ignore[arg-type]
    losses = [run.step(rows, collate, 2).loss for rows in loader]
    assert losses == [again.step(data[at : at + 4], collate, 2).loss for at in (0, 4)]


def test_what_is_done_about_memory_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", waited.append)
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "propagate", True)
    run, memory = failing("alone", wait_for_memory=5, grow_back_after=2)
    for rows, fault, size in ((3, 5, 1), (3, None, 1), (3, None, 3), (1, 5, 1)):
        with memory.fail_at(fault):
            outcome = run.step(rows_of(rows), collate, rows)
        assert (outcome.micro_batch, outcome.retried) == (size, fault is not None)
    assert waited == [1.0]
    out_of_memory = "out of memory in forward on rank 0"
    assert [record.message for record in caplog.records] == [
        f"micro-batch 3 -> 1 ({out_of_memory}, step 1)",
        "micro-batch 1 -> 3 (no OOM for 2 steps, step 3)",
        f"{out_of_memory}, at the smallest size: retrying in 1 s (step 4)",
    ]


@pytest.mark.parametrize(
    ("size", "advice"), [(1, "There is no smaller size"), (2, "a smaller size")]
)
def test_advice_where_a_step_cannot_be_retried(size: int, advice: str) -> None:
    run = Trained("alone")
    run.optimizer.step = _lose  # type: ignore[method-assign]
    with pytest.raises(TrainingOutOfMemory) as error:
        run.step(rows_of(size), collate, size)
    assert advice in str(error.value)


def _lose() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_trials_and_retries_are_shown_where_nobody_configures_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    monkeypatch.setattr(logging.getLogger("torchtune_adaptive"), "level", logging.NOTSET)
    batch = lambda rows: collate(rows_of(rows))  # noqa: E731
    searching = Trained("alone", memory_limit="4KiB").step
    size = find_batch_size(searching, batch, headroom=0.0)
    assert (size.status.is_proof, size.why) == (True, f"{2 * size} rows: out of memory in backward")
    assert find_batch_size(searching, batch, ceiling=1).why == "no larger one is allowed"
    *trials, found, one, of_one = capsys.readouterr().err.splitlines()
    assert len(trials) == len(size.trials) and all("peak" in line for line in [*trials, one])
    assert found == f"torchtune_adaptive: micro-batch {size}: the next size does not fit"
    assert of_one == "torchtune_adaptive: micro-batch 1: it is the largest size allowed"

    run, memory = failing("alone")
    with memory.fail_at(5):
        run.step(rows_of(4), collate, 4)
    retried = (
        "torchtune_adaptive: micro-batch 4 -> 2 (out of memory in forward on rank 0, step 1)\n"
    )
    assert capsys.readouterr().err == retried
    assert (run.step.micro_batch, run.step.retried_steps) == (2, 1)


def test_the_reference_is_that_of_the_docstrings() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = runpy.run_path(str(docs / "make" / "api.py"))["page"]
    assert (docs / "api.md").read_text() == page(), "run: python docs/make/api.py > docs/api.md"


def test_in_a_plan_autocast_is_refused_but_where_checkpointing_sets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.autocast, "__init__", torch.autocast.__init__)
    model_steps._refuse_autocast()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False, cache_enabled=True):
        pass
    with pytest.raises(NoPrediction, match="cannot be traced"):
        torch.autocast("cuda")
