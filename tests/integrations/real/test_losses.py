"""Losses that are not divided by ``num_items_in_batch``: ours are those of the plain trainer all the same."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.integrations.real.models import MODELS, Collating, model_of, rows_for
from tests.integrations.real.trainers import (
    AS_CONFIGURED,
    SEARCHING,
    Loss,
    distance,
    fsdp2_on_cpu,
    llama,
    lora,
    make,
    on_ranks,
    rank,
    result,
    tokens,
    trained,
)
from tests.integrations.real.ways import FSDP2, everything
from torchtune_adaptive import TrainingOutOfMemory, UsageError
from torchtune_adaptive.integrations import Adaptive
from torchtune_adaptive.integrations.trainer_step import TrainerStep

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]
CLOSE = 1e-6
ROWS = 16  # of a step
WAYS: dict[str, dict[str, Any]] = {"alone": {}, "ddp": {}, "fsdp2": FSDP2}


def settings_for(name: str, size: int, way: str = "alone", **more: Any) -> dict[str, Any]:
    if way == "fsdp2":
        fsdp2_on_cpu()
    return (
        WAYS[way]
        | {
            "model": model_of(name),
            "data": rows_for(name),
            "data_collator": Collating,
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": ROWS // size,
        }
        | more
    )


def compare(name: str, size: int, searching: Adaptive = SEARCHING) -> dict[str, Any]:
    run = lambda options, *lost: trained("trainer", options, *lost, **settings_for(name, size))  # noqa: E731
    plain, equal, searched = run(None), run(AS_CONFIGURED), run(searching)
    lost = run(AS_CONFIGURED, Loss(step=2))
    return {
        "equal": distance(equal, plain),
        "same": torch.equal(equal.weights, plain.weights),
        "searched": distance(searched, plain),
        "lost": distance(lost, plain),
        "sizes": (searched.sizes, lost.sizes),
    }


def of_sizes(name: str) -> dict[int, dict[str, Any]]:
    return {size: compare(name, size) for size in (16, 4, 2)}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    [found] = on_ranks(of_sizes, 1, name)
    for size, seen in found.items():
        assert seen["equal"] == 0 and seen["same"], seen
        assert seen["searched"] <= CLOSE and seen["lost"] <= CLOSE, seen
        # A micro-batch has rows of one batch, where these have different numbers of labels.
        most = size if MODELS[name][2] == "LABELS" else ROWS
        assert seen["sizes"] == ((most, most), (size, size // 2)), seen


def of_odd_epochs(name: str) -> list[float]:
    """Epochs that end with a batch of two rows."""
    more = {"data": rows_for(name, 22), "max_steps": -1, "num_train_epochs": 2}
    run = lambda options, *lost: trained(  # noqa: E731
        "trainer", options, *lost, **settings_for(name, 4) | more
    )
    plain = run(None)
    return [
        distance(run(*each), plain)
        for each in ((AS_CONFIGURED,), (SEARCHING,), (AS_CONFIGURED, Loss()))
    ]


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForSequenceClassification"])
def test_epochs_that_end_with_a_short_batch(name: str) -> None:
    [[equal, searched, lost]] = on_ranks(of_odd_epochs, 1, name)
    assert equal == 0 and searched <= CLOSE and lost <= CLOSE


# --- losses of the user's own ---------------------------------------------------------------------


def mean(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def shifted(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_rows(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.stack(
        [cross_entropy(*each) for each in zip(outputs.logits, labels, strict=True)]
    ).mean()


def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    summed = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return summed / num_items_in_batch


def drawn(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    noise = 0.1 * torch.randn_like(outputs.logits)
    return cross_entropy((outputs.logits + noise).flatten(0, 1), labels.flatten())


def drawn_by_numpy(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return mean(outputs, labels) * (1 + 0.1 * float(np.random.rand()) + 0.1 * random.random())


def partly(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return divided(outputs, labels, num_items_in_batch) + outputs.logits.square().mean()


def weighted(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    weight = torch.tensor([1.0, 2.0, 4.0])
    return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight=weight)


def between_rows(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    whole = outputs.logits.sum(1)
    return mean(outputs, labels) + (whole @ whole.T).square().mean()


OWN: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "mean": (mean, "LABELS"),
    "shifted": (shifted, "LATER_LABELS"),
    "of rows": (of_rows, "ROWS"),
    "divided": (divided, "ITEMS"),
    "drawn": (drawn, "BATCH"),
    "drawn by numpy": (drawn_by_numpy, "BATCH"),
    "partly": (partly, "BATCH"),
    "weighted": (weighted, "BATCH"),
    "between rows": (between_rows, "BATCH"),
}


def with_own(name: str) -> Any:
    function, expected = OWN[name]
    times = 1 if expected == "BATCH" else 2
    more = {"compute_loss_func": function}
    model = "LlamaForTokenClassification"
    with tempfile.TemporaryDirectory() as folder:
        trainer = make("trainer", SEARCHING, folder, **settings_for(model, 4, **more))
        trainer.train()
        found = trainer._adaptive_step._terms.name
    run = lambda options, *lost: trained(  # noqa: E731
        "trainer", options, *lost, **settings_for(model, 4, **more)
    )
    plain = run(None)
    return found, max(
        distance(run(*each), plain) for each in ((SEARCHING,), (AS_CONFIGURED, Loss(times=times)))
    )


@pytest.mark.parametrize("name", OWN)
def test_a_loss_of_the_users_own(name: str) -> None:
    [(found, far)] = on_ranks(with_own, 1, name)
    assert far <= CLOSE and found == OWN[name][1]


def of_tokens(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        options = Adaptive(memory_limit="64MiB", token_budget=True)
        trainer = make("trainer", options, folder, **settings_for(name, 4))
        with pytest.raises(UsageError) as error:
            trainer.train()
    return str(error.value)


def test_token_budgets_are_refused_where_rows_of_a_batch_stay_together() -> None:
    [said] = on_ranks(of_tokens, 1, "BertForMaskedLM")
    assert said.startswith(
        "token_budget: the rows of a micro-batch are of one batch, whatever their length, as the loss of "
        "BertForMaskedLM is a mean over the labels of a batch"
    )


# --- nothing is left ------------------------------------------------------------------------------


def around_the_look(name: str) -> int:
    """The number of forward passes of a first look, which changes nothing."""
    look, passes = TrainerStep._look_at_loss, []

    def watched(self: TrainerStep, step: Any) -> None:
        model = self._trainer.model
        hook = model.register_forward_hook(lambda *_: passes.append(None))
        before = [*everything(self._trainer), [each.training for each in model.modules()]]
        look(self, step)
        hook.remove()
        after = [*everything(self._trainer), [each.training for each in model.modules()]]
        for one, other in zip(before[0], after[0], strict=True):
            assert torch.equal(one, other)
        assert before[1:] == after[1:]
        assert self._trainer.current_gradient_accumulation_steps == 4

    TrainerStep._look_at_loss = watched  # type: ignore[method-assign]
    dropout = {"attention_dropout": 0.1} if "Llama" in name else {"hidden_dropout_prob": 0.1}
    model = model_of(name, **dropout)
    trained("trainer", AS_CONFIGURED, **settings_for(name, 4, model=model, max_steps=1))
    return len(passes)


@pytest.mark.parametrize(
    ("name", "passes"), [("LlamaForCausalLM", 3), ("BertForMaskedLM", 18 + 12)]
)
def test_a_first_look_leaves_no_trace(name: str, passes: int) -> None:
    assert on_ranks(around_the_look, 1, name) == [passes]


class Packing(torch.nn.Linear):
    """Packs its weights for good in evaluation, as those of bitsandbytes with 4 bits do on some CPUs."""

    support_avx512bf16_for_cpu = True
    packed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.packed |= self.support_avx512bf16_for_cpu and not self.training
        return super().forward(x)


def with_packing() -> tuple[bool, bool]:
    model = llama()
    model.lm_head = head = Packing(model.config.hidden_size, model.config.vocab_size, bias=False)
    trained("trainer", AS_CONFIGURED, model=model)
    return head.packed, head.support_avx512bf16_for_cpu


def test_a_first_look_packs_no_weights() -> None:
    assert on_ranks(with_packing, 1) == [(False, True)]


# --- with what else a trainer has -----------------------------------------------------------------

FEATURES: dict[str, dict[str, Any]] = {
    "lora": {"lora": "TOKEN_CLS"},
    "checkpointing": {"gradient_checkpointing": True},
    "smoothing": {"label_smoothing_factor": 0.1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "said not to": {"accepts_loss_kwargs": False},
}


def with_feature(name: str, way: str) -> dict[str, Any]:
    model_name = "LlamaForTokenClassification"

    def settings() -> dict[str, Any]:
        from peft import get_peft_model

        more = dict(FEATURES[name])
        model = model_of(model_name)
        if "lora" in more:
            model = get_peft_model(model, lora(more.pop("lora")))
        if "accepts_loss_kwargs" in more:
            model.accepts_loss_kwargs = more.pop("accepts_loss_kwargs")
        if "eval_steps" in more:
            more["eval_dataset"] = rows_for(model_name, 16)
        return settings_for(model_name, 4, way, model=model, **more)

    where = "loss" if name == "compiled" else "policy"
    run = lambda options, *lost: trained("trainer", options, *lost, **settings())  # noqa: E731
    plain = run(None)
    ours = [run(AS_CONFIGURED), run(SEARCHING), run(AS_CONFIGURED, Loss(step=2, where=where))]
    evaluations = {str(each.column("eval_loss")) for each in (plain, ours[0])}
    return {
        "far": [distance(each, plain) for each in ours],
        "evaluations": evaluations,
        "sizes": [each.sizes for each in ours],
    }


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("way", WAYS)
def test_with(name: str, way: str) -> None:
    for seen in on_ranks(with_feature, 1 if way == "alone" else 2, name, way):
        assert max(seen["far"]) <= CLOSE and len(seen["evaluations"]) == 1, seen
        assert way != "alone" or seen["far"][0] == 0, seen
        assert seen["sizes"][2][1] < 4, seen


def resumed(name: str, way: str, folder: str) -> dict[str, Any]:
    """Training that loses memory and is ended and resumed, beside training that is not."""
    run = lambda options, lost=(), **more: trained(  # noqa: E731
        "trainer", options, lost, **settings_for(name, 4, way, **more)
    )
    plain = run(None)
    run(AS_CONFIGURED, Loss(), folder=folder, save_strategy="steps", save_steps=2)
    rest = run(AS_CONFIGURED, folder=folder, resume=f"{folder}/checkpoint-2")
    return {"far": distance(rest, plain), "sizes": rest.sizes}


@pytest.mark.parametrize(
    ("name", "way"), [("BertForMaskedLM", "alone"), ("BertForMaskedLM", "ddp")]
)
def test_a_resumed_run_counts_as_before(name: str, way: str, tmp_path: Path) -> None:
    for seen in on_ranks(resumed, 1 if way == "alone" else 2, name, way, str(tmp_path)):
        assert seen["far"] <= CLOSE and seen["sizes"] == (4, 2), seen


# --- on ranks -------------------------------------------------------------------------------------


def on_two(name: str, way: str) -> dict[str, Any]:
    run = lambda options, *lost: trained(  # noqa: E731
        "trainer", options, *lost, **settings_for(name, 4, way, data=rows_for(name, 128))
    )
    plain = run(None)
    ours = [
        run(AS_CONFIGURED),
        run(SEARCHING),
        *(run(AS_CONFIGURED, Loss(1 + on, on)) for on in (0, 1)),
    ]
    return {"far": [distance(each, plain) for each in ours], "sizes": [each.sizes for each in ours]}


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["LlamaForTokenClassification", "LlamaForSequenceClassification"])
def test_two_ranks(name: str, way: str) -> None:
    for seen in on_ranks(on_two, 2, name, way):
        assert max(seen["far"]) <= CLOSE, seen
        assert seen["sizes"][2][1] == seen["sizes"][3][1] == 2, seen


def without_memory(way: str) -> str:
    """What ends the training where one rank has no memory for a first look."""
    name = "LlamaForSequenceClassification"
    with tempfile.TemporaryDirectory() as folder:
        trainer = make("trainer", AS_CONFIGURED, folder, **settings_for(name, 4, way))

        def lose(*_: Any) -> None:
            if rank() == 1 and not trainer.model.training:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")

        trainer.model.model.layers[1].register_forward_pre_hook(lose)
        with pytest.raises(TrainingOutOfMemory) as error:
            trainer.train()
    return str(error.value)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_no_rank_waits_for_one_without_memory_for_a_first_look(way: str) -> None:
    first, second = on_ranks(without_memory, 2, way)
    assert first == second and "a first look at the loss" in first and "rank 1" in first


# --- losses that are no number --------------------------------------------------------------------

MARK = 2
ROW_WITHOUT = 17


def no_number(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """The loss of tokens, which is no number for those that are marked."""
    loss = cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    marked = (labels[:, 1:] == MARK).flatten()
    return (loss * torch.where(marked, torch.nan, 1.0)).sum() / num_items_in_batch


def with_no_number(settings: dict[str, Any], ranks: int) -> dict[str, Any]:
    rows = tokens(16 * 4 * ranks, ragged=True).to_list()
    rows[ROW_WITHOUT]["labels"][-1] = MARK
    settings = {"compute_loss_func": no_number, "max_steps": 4} | settings
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}

    def run(options: Adaptive | None, lost: Any = ()) -> Any:
        from datasets import Dataset

        with tempfile.TemporaryDirectory() as folder:
            trainer = make("trainer", options, folder, data=Dataset.from_list(rows), **settings)
            trainer.train()
            one = result(trainer)
            one.more["losses"] = [entry["loss"] for entry in one.logs if "loss" in entry]
            one.more["losses"].append(trainer.state.log_history[-1]["train_loss"])
            return one

    plain, equal, searched = run(None), run(AS_CONFIGURED), run(SEARCHING)
    return {
        "losses": [each.more["losses"] for each in (plain, equal, searched)],
        "ruined": [bool(each.weights.isnan().any()) for each in (plain, equal, searched)],
        "found": searched.sizes,
    }


OF_LOGS = {
    "each step": {},
    "every third": {"logging_steps": 3},
    "all": {"logging_nan_inf_filter": False},
}


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in OF_LOGS), ("each step", 2)])
def test_a_loss_that_is_no_number_is_logged_as_one_or_as_a_mean(name: str, ranks: int) -> None:
    for seen in on_ranks(with_no_number, ranks, OF_LOGS[name], ranks):
        plain, equal, searched = seen["losses"]
        assert seen["ruined"] == [True] * 3 and seen["found"][0] == 16, seen
        for losses in (plain, equal, searched):
            assert (name == "all") == any(loss != loss for loss in losses), seen
