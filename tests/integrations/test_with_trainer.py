"""transformers' own trainer, alone: loaders of one's own, trials with other arguments, and layers."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from torchtune_adaptive import UsageError
from torchtune_adaptive.integrations import Adaptive

pytest.importorskip("accelerate")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from tests.helpers.tiny_trainer import Net, Rows, arguments, losses, searched
from torchtune_adaptive.integrations import layers
from torchtune_adaptive.integrations.mixin import AdaptiveMixin
from torchtune_adaptive.integrations.script import adapt_trainers
from torchtune_adaptive.integrations.trainer_step import learned_in
from torchtune_adaptive.integrations.transformers import AdaptiveTrainerMixin, adaptive

LIMIT = Adaptive(memory_limit="64MiB")


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> None:
    """What is said is logged here."""
    caplog.set_level("INFO", "torchtune_adaptive")


# --- trained again ----------------------------------------------------------------------------------


class Alive(TrainerCallback):  # type: ignore[misc]
    """Notes which models there are after each step."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.seen: list[list[int]] = []

    def model(self) -> nn.Module:
        model = Net()
        self.made.append(weakref.ref(model))
        return model

    def on_step_end(self, *_: Any, **named: Any) -> None:
        del named
        gc.collect()
        self.seen.append([number for number, model in enumerate(self.made) if model() is not None])


def test_nothing_is_kept_of_the_model_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alive = Alive()
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    trainer = adaptive(Trainer, LIMIT)(
        args=arguments(tmp_path, **evaluated),
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        model_init=alive.model,
        callbacks=[alive],
    )
    for _ in range(3):
        trainer.train()
    assert alive.seen == [[1], [2], [3]]  # the first is made with the trainer
    assert caplog.text.count(": it is the largest size allowed") == 3


def test_trials_change_the_rows_of_a_step(tmp_path: Path) -> None:
    trials = (
        {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    )
    plain, ours, searching = (
        searched(
            kind(args=arguments(tmp_path), train_dataset=Rows(), model_init=Net),
            *trials,
        )
        for kind in (Trainer, adaptive(Trainer, Adaptive(search=False)), adaptive(Trainer, LIMIT))
    )
    assert len(plain) == 3 and len({tuple(each) for each in plain}) == 3
    for one, other, found in zip(plain, ours, searching, strict=True):
        assert other == pytest.approx(one, rel=1e-6) and found == pytest.approx(one, rel=1e-5)


def test_what_a_trial_sets_is_refused_as_by_the_trainer(tmp_path: Path) -> None:
    kind = adaptive(Trainer, LIMIT)
    trainer = kind(args=arguments(tmp_path), train_dataset=Rows(), model_init=Net)
    with pytest.raises(UsageError, match=r"^auto_find_batch_size: True"):
        searched(trainer, {"auto_find_batch_size": True})


def test_a_checkpoint_of_an_old_version_has_learned_nothing(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    assert learned_in(str(tmp_path)) is None


# --- loaders ------------------------------------------------------------------------------------------


class Chain:
    """Two loaders, one after the other."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        for each in self.loaders:
            yield from each


class Joining(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return Chain(super().get_train_dataloader(), super().get_train_dataloader())


class AdaptiveJoining(AdaptiveTrainerMixin, Trainer):  # type: ignore[misc]
    """The same by a subclass of the mixin, which makes each of the loaders."""

    adaptive = LIMIT

    def get_train_dataloader(self) -> Any:
        return Chain(super().get_train_dataloader(), super().get_train_dataloader())


def test_loaders_that_are_joined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each has three batches, so a step has batches of both."""
    found = []
    for kind in (Joining, adaptive(Joining, LIMIT), AdaptiveJoining):
        args = arguments(tmp_path, gradient_accumulation_steps=2, max_steps=9)
        torch.manual_seed(1)
        trainer = kind(Net(), args, train_dataset=Rows(24))
        trainer.train()
        found.append(losses(trainer))
    plain, ours, inside = found
    assert len(plain) == 9
    assert ours == pytest.approx(plain, rel=1e-5) and inside == pytest.approx(plain, rel=1e-5)
    assert "no search: the loader has no dataset with a length" in caplog.text


def test_a_loader_that_looks_into_batches_is_refused(tmp_path: Path) -> None:
    class Looking(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            return [{"x": batch["x"] * 2} for batch in loader]

    trainer = adaptive(Looking)(Net(), arguments(tmp_path), train_dataset=Rows())
    with pytest.raises(UsageError, match=r"^get_train_dataloader: your loader looks into a batch"):
        trainer.train()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (row for row in Rows())


def test_a_stream_trains_without_a_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for kind in (Trainer, adaptive(Trainer, LIMIT)):
        trainer = kind(Net(), arguments(tmp_path), train_dataset=Stream())
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]
    assert caplog.text.count("no search: the loader has no dataset with a length") == 1
    for name in ("token_budget", "fastest"):
        options = Adaptive(memory_limit="64MiB", **{name: True})
        args = arguments(tmp_path)
        model = llama() if name == "fastest" else Net()
        stream = Tokens() if name == "fastest" else Stream()
        with pytest.raises(UsageError, match=f"^{name}: the loader has no dataset with a length"):
            adaptive(Trainer, options)(model, args, train_dataset=stream).train()


# --- layers -------------------------------------------------------------------------------------------


class Tokens(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        ids = torch.arange(6)
        return ({"input_ids": ids + row, "labels": ids + row} for row in range(48))


def llama(every: int = 0) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(num_hidden_layers=4, vocab_size=64, use_cache=False, **sizes)
    model = LlamaForCausalLM(config)
    if every:
        model.activation_checkpointing_enable(every_n_layers=every)
    return model


def test_layers_begin_as_they_are_configured() -> None:
    for every, expected in ((0, [False] * 4), (1, [True] * 4), (2, [True, False, True, False])):
        model = llama(every)
        trainer = SimpleNamespace(
            model=model,
            args=SimpleNamespace(torch_compile=False),
            accelerator=SimpleNamespace(unwrap_model=lambda one: one, state=SimpleNamespace()),
        )
        on = lambda of=model: [each.gradient_checkpointing for each in of.model.layers]  # noqa: E731
        relief: Any = layers.all_at_once(trainer)
        assert (relief is None) == (every == 1)
        if every == 2:
            relief.use("all")
            assert on() == [True] * 4
            relief.use(relief.configured)
        assert on() == expected
        found = layers.one_by_one(trainer)
        assert on() == expected and found.checkpointed == sum(expected)


class Ending(TrainerCallback):  # type: ignore[misc]
    """Notes which layers are checkpointed at the end of a training, which puts them back."""

    def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.on = [each.gradient_checkpointing for each in model.model.layers]


def test_layers_are_those_that_were_chosen(tmp_path: Path) -> None:
    """Trials and timed steps set back what they change, but not which layers are checkpointed."""
    ending, rows = Ending(), list(Tokens())
    args = arguments(tmp_path, activation_checkpointing=True, max_steps=1)
    options = Adaptive(memory_limit="1GiB", fastest=True)
    trainer = adaptive(Trainer, options)(llama(), args, train_dataset=rows, callbacks=[ending])
    trainer.train()
    chosen = trainer._adaptive_step._step.layers.checkpointed
    assert ending.on == [number < chosen for number in range(4)]
    assert [each.gradient_checkpointing for each in trainer.model.model.layers] == [True] * 4


def test_layers_that_are_configured_are_relieved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for kind in (Trainer, adaptive(Trainer, Adaptive(search=False))):
        args = arguments(
            tmp_path,
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"every_n_layers": 2},
        )
        ending = Ending()
        trainer = kind(llama(), args, train_dataset=list(Tokens()), callbacks=[ending])
        left = [kind is not Trainer]

        def lose(*_: Any, left: list[bool] = left, trainer: Any = trainer) -> None:
            if trainer.state.global_step == 1 and left == [True]:
                left.pop()
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")

        trainer.model.model.layers[3].register_forward_pre_hook(lose)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-6) and ending.on == [True] * 4
    assert "activation checkpointing configured -> all" in caplog.text


# --- classes ------------------------------------------------------------------------------------------


def test_a_class_that_is_adaptive_is_left_as_it_is(tmp_path: Path) -> None:
    kind = adaptive(Trainer, LIMIT)
    assert adaptive(kind) is kind and adaptive(AdaptiveJoining) is AdaptiveJoining
    other = adaptive(kind, Adaptive(headroom=0.2))
    assert other.adaptive.headroom == 0.2 and issubclass(other, kind)
    assert kind.adaptive == LIMIT
    assert other(Net(), arguments(tmp_path), train_dataset=Rows()).adaptive.headroom == 0.2


def test_a_script_has_one_class_for_each_of_its_trainers(tmp_path: Path) -> None:
    made = adapt_trainers(LIMIT, "a script")
    try:
        one, two = (Trainer(Net(), arguments(tmp_path), train_dataset=Rows()) for _ in range(2))
        other = Joining(Net(), arguments(tmp_path), train_dataset=Rows())
    finally:
        # Where it is only deleted, Python no longer lets object's own have arguments.
        Trainer.__new__ = lambda kind, *_, **__: object.__new__(kind)
    assert type(one) is type(two) is made[Trainer] and isinstance(one, AdaptiveMixin)
    assert type(other) is made[Joining] is not type(one)


class Ours(BatchSampler):
    """Chooses the rows of each batch, as where each is of one dataset."""

    def __init__(self, rows: int) -> None:
        super().__init__(range(rows), 4, False)


class Chosen(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        own = Ours(len(self.train_dataset))
        return DataLoader(self.train_dataset, batch_sampler=own, collate_fn=self.data_collator)


def test_rows_that_were_chosen_together_stay_together(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
    trained = []
    for kind in (Chosen, adaptive(Chosen, LIMIT), adaptive(Trainer, LIMIT)):
        torch.manual_seed(1)
        trained.append(kind(Net(), arguments(tmp_path, **sizes), train_dataset=Rows()))
        trained[-1].train()
    plain, ours, merged = trained
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    assert ours._adaptive_step._step.micro_batch == 4 < merged._adaptive_step._step.micro_batch
    options = Adaptive(memory_limit="64MiB", token_budget=True)
    budgeted = adaptive(Chosen, options)(Net(), arguments(tmp_path, **sizes), train_dataset=Rows())
    with pytest.raises(
        UsageError, match=r"^token_budget: .* a batch sampler of your own has chosen them"
    ):
        budgeted.train()


# --- what a step does besides ---------------------------------------------------------------------------


def beside_plain(kind: type, folder: Path, more: Callable[[], dict[str, Any]] = dict) -> list[Any]:
    """Trainers of a kind after training: plain, with smaller micro-batches, and with memory lost once."""
    trained = []
    for options in (None, Adaptive(memory_limit="64MiB", ceiling=2), Adaptive(search=False)):
        torch.manual_seed(1)
        made = kind if options is None else adaptive(kind, options)
        trainer = made(Net(), arguments(folder, max_steps=6), train_dataset=Rows(), **more())
        left = [None] * (options is not None and not options.search)

        def lose(*_: Any, left: list[None] = left, trainer: Any = trainer) -> None:
            if trainer.state.global_step == 3 and left:
                left.pop()
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")

        trainer.model.layer.register_forward_hook(lose)
        trainer.train()
        assert not left
        trained.append(trainer)
    plain, *ours = trained
    for each in ours:
        assert losses(each) == pytest.approx(losses(plain), rel=1e-5)
    return trained


class Scaling:
    """A collate function that scales rows at random, by a generator of its own, or by torch's."""

    def __init__(self, seed: int | None) -> None:
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        batch["x"] *= torch.rand(len(rows), 1, generator=self.generator)
        return batch


@pytest.mark.parametrize("seed", [None, 3])
def test_batches_that_are_drawn_are_divided_as_they_are(seed: int | None, tmp_path: Path) -> None:
    more = lambda: {"data_collator": Scaling(seed)}  # noqa: E731
    _, *ours = beside_plain(Trainer, tmp_path, more)
    assert [each._adaptive_step._step.micro_batch for each in ours] == [2, 4]
    options = Adaptive(memory_limit="64MiB", token_budget=True)
    trainer = adaptive(Trainer, options)(Net(), arguments(tmp_path), train_dataset=Rows(), **more())
    with pytest.raises(UsageError, match=r"^token_budget: micro-batches are parts of"):
        trainer.train()


class Counting(Trainer):  # type: ignore[misc]
    """Counts what it computes losses of, in attributes that nobody else knows of."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.counted: dict[str, Any] = {"rows": torch.zeros(()), "by step": {}}
        self.rows_seen = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        rows, by_step = len(inputs["x"]), self.counted["by step"]
        self.rows_seen += rows
        self.counted["rows"] = self.counted["rows"] + rows
        by_step[self.state.global_step] = by_step.get(self.state.global_step, 0) + rows
        return super().compute_loss(model, inputs, *args, **named)


def test_what_a_trainer_counts_counts_once(tmp_path: Path) -> None:
    for each in beside_plain(Counting, tmp_path):
        assert (each.rows_seen, float(each.counted["rows"])) == (48, 48.0)
        assert each.counted["by step"] == dict.fromkeys(range(6), 8)


class Weighing(Trainer):  # type: ignore[misc]
    """Has a loss with a parameter of its own."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        torch.manual_seed(2)
        self.loss = nn.Linear(4, 1)

    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD(
            [*self.model.parameters(), *self.loss.parameters()], lr=0.1
        )
        # The trainer sets only those of its model to 0.
        self.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        return super().compute_loss(model, inputs) + self.loss(inputs["x"]).pow(2).mean()


def test_a_loss_with_parameters_trains(tmp_path: Path) -> None:
    plain, *ours = beside_plain(Weighing, tmp_path)
    for each in ours:
        torch.testing.assert_close(each.loss.weight, plain.loss.weight)
    before = nn.Linear(4, 1)
    torch.manual_seed(2)
    before.reset_parameters()
    assert not torch.equal(plain.loss.weight, before.weight)


class Spread(nn.Module):
    """A part of a loss that compares rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight * rows.mean(0).pow(2).sum()


class Growing(TrainerCallback):  # type: ignore[misc]
    """Raises the weight of that part from 0 in each step."""

    def __init__(self, loss: Spread) -> None:
        self.loss = loss

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.loss.weight = max(0, state.global_step - 1) * 0.1


class Spreading(Trainer):  # type: ignore[misc]
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.loss = Spread()
        self.add_callback(Growing(self.loss))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        spread = self.loss(model.layer(inputs["x"]) * inputs["x"])
        return super().compute_loss(model, inputs) + spread


def test_a_loss_that_changes_is_looked_at_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, smaller, lost = beside_plain(Spreading, tmp_path)
    assert smaller._adaptive_step._step.micro_batch == lost._adaptive_step._step.micro_batch == 8
    assert caplog.text.count("batches are not divided from now on: its loss follows how rows") == 2
