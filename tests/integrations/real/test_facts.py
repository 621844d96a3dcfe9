"""What the integrations rely on in other libraries: each fact, on the installed version."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.real.trainers import AS_CONFIGURED, NAMES, make, on_ranks, texts, tokens
from torchtune_adaptive.integrations.host_state import state_of
from torchtune_adaptive.integrations.layers import all_at_once

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks]

FACTS = {
    "one backward": "Trainer.training_step calls accelerator.backward once, with the loss",
    "no scaling": "accelerator.backward does not divide the loss by the number of batches",
    "sync_gradients": "the loop sets accelerator.sync_gradients before the last batch of a step, only",
    "mean over batches": "a loss that is a mean is divided by current_gradient_accumulation_steps",
    "sum of batches": "a loss that is scaled by itself is added up as compute_loss gives it",
    "loss alone": "compute_loss gives the loss of a batch without gradients, given num_items_in_batch",
    "own log": "what is logged of training goes through log(), and has a loss; that of evaluations has none",
    "batches of a step": "get_batch_samples takes the batches of a step, once, before training_step",
    "data_collator": "get_train_dataloader collates by self.data_collator, or by a wrapper of that name",
    "is_in_train": "is_in_train is set while train() calls get_train_dataloader, and not before",
    "callback states": "a callback that is an ExportableState is in stateful_callbacks by its class's name",
    "broadcast_buffers": "DistributedDataParallel is made with what accelerator.ddp_handler says",
    "host state": "compute_loss changes no attribute of a trainer but numbers, and containers of these",
    "checkpointing": "a model turns it on and off by two methods, and says whether it is on",
    "gathers": "gather_for_metrics launches by accelerator.gather",
    "evaluation": "evaluation_loop takes the batches of its loader, and calls prediction_step with each",
    "collates in evaluation": "accelerate's loader has torch's as base_dataloader, with its collate_fn",
    "averages": "_metrics has lists for train and eval, to which compute_loss appends a value for each batch",
    "wrapped model": "training_step gets model_wrapped, which get_train_dataloader does not yet have",
    "own batches": "GRPO and RLOO count and time batches in training_step, and generate in _prepare_inputs",
    "own rows": "what their _prepare_inputs gives is tensors with equal rows, and numbers for all",
    "own generation": "_generate_single_turn gets prompts, images and fields, and calls generate() once",
    "own scoring": "_get_per_token_logps_and_entropies gets model, tokens, mask, width and rows at once",
    "own prompts": "_tokenize_prompts gives the tokens of each prompt first",
    "draws": "generate() samples a token of each row by one torch.multinomial over all rows",
    "source of a loader": "fit_loop._data_source.dataloader gives Lightning's loader, after setup",
    "order of a batch": "automatic optimization calls training_step, optimizer_zero_grad and backward once",
    "end of a step": "the optimizer steps with each accumulate_grad_batches-th batch, and with the last",
}
CHECKS: dict[str, Callable[[Any], Any]] = {}
"""Functions that raise where a fact does not hold; each gets a folder."""


def check(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def added(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        CHECKS[name] = function
        return function

    return added


def watched(owner: Any, name: str, seen: Callable[..., Any]) -> None:
    """Call a function with the arguments of each call of a method."""
    own = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        seen(*args, **kwargs)
        return own(*args, **kwargs)

    setattr(owner, name, method)


@check("one backward")
def one_backward(folder: str) -> None:
    for kind in ("trainer", "sft", "dpo", "kto", "reward", "grpo", "rloo"):
        assert backwards(make(kind, None, folder)) == ["step", "loss"] * 8


def backwards(trainer: Any) -> list[str]:
    calls: list[str] = []
    watched(trainer.accelerator, "backward", lambda loss, **_: calls.append("loss"))
    watched(trainer, "training_step", lambda *_, **__: calls.append("step"))
    trainer.train()
    return calls


@check("own log")
def own_log(folder: str) -> None:
    for kind in ("trainer", "sft", "grpo"):
        evaluated = {"eval_strategy": "steps", "eval_steps": 2}
        evaluated["eval_dataset"] = (
            tokens(8) if kind == "trainer" else texts(*COLUMN[kind], count=8)
        )
        trainer, logged = make(kind, None, folder, **evaluated), []
        watched(trainer, "log", lambda logs, *_, to=logged: to.append(sorted(logs)))
        trainer.train()
        assert ["loss" in names for names in logged] == [
            True,
            True,
            False,
            True,
            True,
            False,
            False,
        ]


COLUMN = {"sft": ("text",), "grpo": ("prompt",)}


@check("no scaling")
def no_scaling(folder: str) -> None:
    assert make("trainer", None, folder).accelerator.gradient_accumulation_steps == 1


@check("sync_gradients")
def sync_gradients(folder: str) -> None:
    trainer, flags = make("trainer", None, folder), []
    accelerator = trainer.accelerator
    watched(trainer, "training_step", lambda *_, **__: flags.append(accelerator.sync_gradients))
    trainer.train()
    assert flags == [False, True] * 4


@check("mean over batches")
def mean_over_batches(folder: str) -> None:
    trainer, losses = make("dpo", None, folder, max_steps=1, gradient_accumulation_steps=1), []
    watched(trainer.accelerator, "backward", lambda loss, **_: losses.append(float(loss)))
    step = trainer.training_step

    def with_other_counts(model: Any, inputs: Any, items: Any) -> Any:
        for count in (1, 2.5):
            trainer.current_gradient_accumulation_steps = count
            loss = step(model, dict(inputs), items)
        return loss

    trainer.training_step = with_other_counts
    trainer.train()
    assert losses[1] == pytest.approx(losses[0] / 2.5)


@check("sum of batches")
def sum_of_batches(folder: str) -> None:
    trainer, losses, added = make("trainer", None, folder, max_steps=1), [], []
    compute_loss = trainer.compute_loss

    def computed(*args: Any, **named: Any) -> Any:
        losses.append(compute_loss(*args, **named))
        return losses[-1]

    trainer.compute_loss = computed
    watched(trainer.accelerator, "backward", lambda loss, **_: added.append(loss))
    trainer.train()
    assert len(losses) == 2 and all(map(torch.equal, losses, added))


@check("loss alone")
def loss_alone(folder: str) -> None:
    for kind in ("trainer", "sft"):
        trainer, seen = make(kind, None, folder, max_steps=1), []
        compute_loss, found = trainer.compute_loss, []

        def computed(
            model: Any, inputs: Any, own: Any = compute_loss, to: Any = found, **named: Any
        ) -> Any:
            with torch.no_grad():
                to.append(own(model, dict(inputs), **named))
            loss = own(model, inputs, **named)
            to.append(loss.detach())
            assert [*named] == ["num_items_in_batch"]
            return loss

        trainer.compute_loss = computed
        watched(trainer.accelerator, "backward", lambda loss, to=seen, **_: to.append(loss))
        trainer.train()
        assert len(found) == 4 and all(map(torch.equal, found[::2], found[1::2]))


@check("batches of a step")
def batches_of_a_step(folder: str) -> None:
    trainer, calls = (
        make("trainer", None, folder, max_steps=-1, num_train_epochs=1, data=tokens(20)),
        [],
    )
    watched(trainer, "get_batch_samples", lambda _, number, *__: calls.append(number))
    watched(trainer, "training_step", lambda *_, **__: calls.append("step"))
    trainer.train()
    assert calls == [2, "step", "step", 2, "step", "step", 1, "step"]


@check("data_collator")
def data_collator(folder: str) -> None:
    class Listed(list):  # type: ignore[type-arg]
        """A dataset that is no table, whose unused columns the trainer drops while it collates."""

    trainer = make("trainer", None, folder, data=Listed(tokens(16)))
    assert trainer.get_train_dataloader().collate_fn.data_collator is trainer.data_collator
    for kind in ("trainer", "sft", "dpo", "kto", "reward"):
        trainer = make(kind, None, folder)
        assert trainer.get_train_dataloader().collate_fn is trainer.data_collator


@check("is_in_train")
def is_in_train(folder: str) -> None:
    trainer, flags = make("trainer", None, folder), []
    assert not trainer.is_in_train
    watched(trainer, "get_train_dataloader", lambda: flags.append(trainer.is_in_train))
    trainer.train()
    assert flags == [True]


@check("callback states")
def callback_states(folder: str) -> None:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    class Counted(TrainerCallback, ExportableState):
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"count": 3}}

    settings = {"callbacks": [Counted()], "save_strategy": "steps", "save_steps": 2}
    trainer = make("trainer", None, folder, **settings)
    trainer.train()
    loaded = type(trainer.state).load_from_json(f"{folder}/checkpoint-2/trainer_state.json")
    assert loaded.stateful_callbacks["Counted"] == {"args": {}, "attributes": {"count": 3}}


@check("broadcast_buffers")
def broadcast_buffers(folder: str) -> None:
    trainer = make("trainer", None, folder, ddp_broadcast_buffers=True)
    assert trainer.accelerator.ddp_handler.broadcast_buffers
    ours = make("trainer", AS_CONFIGURED, folder)
    ours.train()
    if dist.is_initialized():
        assert not ours.model_wrapped.broadcast_buffers


@check("host state")
def host_state(folder: str) -> None:
    for kind in ("trainer", "sft", "dpo", "kto", "reward", "grpo", "rloo"):
        trainer = make(kind, None, folder, max_steps=1, gradient_accumulation_steps=1)
        compute_loss, trainer.restored = trainer.compute_loss, ()

        def compared(*args: Any, own: Any = compute_loss, one: Any = trainer, **kwargs: Any) -> Any:
            kept = state_of(one).values
            before = {key: repr(value) for key, value in vars(one).items()}
            loss = own(*args, **kwargs)
            after = {key: repr(value) for key, value in vars(one).items()}
            changed = {key for key in after if before.get(key) != after[key]}
            assert changed <= kept.keys(), changed
            return loss

        trainer.compute_loss = compared
        trainer.train()


@check("checkpointing")
def checkpointing(folder: str) -> None:
    trainer = make("trainer", AS_CONFIGURED, folder)
    relief = all_at_once(trainer)
    assert relief is not None
    layer = trainer.model.model.layers[0]
    for switch, expected in zip(relief, (True, False), strict=True):
        switch()
        assert layer.gradient_checkpointing is expected
        assert (all_at_once(trainer) is None) is expected


@check("gathers")
def gathers(folder: str) -> None:
    trainer, calls = make("trainer", None, folder), []
    watched(trainer.accelerator, "gather", lambda value: calls.append(value))
    trainer.accelerator.gather_for_metrics(torch.ones(2))
    assert len(calls) == 1


@check("evaluation")
def evaluation(folder: str) -> None:
    trainer, seen = make("trainer", None, folder), []
    watched(trainer, "prediction_step", lambda model, inputs, *_, **__: seen.append(inputs))
    batches = list(trainer.get_eval_dataloader(tokens(16)))
    loader = trainer.get_eval_dataloader(tokens(16))
    loader.base_dataloader.collate_fn = lambda rows: {**batches[len(seen)], "input_ids": MARKED}
    trainer.evaluation_loop(loader, "Evaluation", prediction_loss_only=True)
    assert len(seen) == len(batches)
    assert all((one["input_ids"] == MARKED).all() for one in seen)


MARKED = torch.full((8, 16), 5)


@check("collates in evaluation")
def collates_in_evaluation(folder: str) -> None:
    loader = make("trainer", None, folder).get_eval_dataloader(tokens(8))
    loader.base_dataloader.collate_fn = len
    assert list(loader) == [8]


@check("averages")
def averages(folder: str) -> None:
    for kind in ("sft", "dpo", "kto", "reward"):
        data = texts(*NAMES[kind], count=12)
        if kind == "kto":
            data = data.add_column("label", [number % 3 > 0 for number in range(12)])
        trainer = make(kind, None, folder, eval_dataset=data, per_device_eval_batch_size=4)
        seen: list[Any] = []
        watched(
            trainer,
            "log",
            lambda *_, of=trainer, to=seen, **__: to.append(
                {name: len(values) for name, values in of._metrics["eval"].items()}
            ),
        )
        trainer.evaluate()
        assert seen[0].pop("num_tokens") == 1 and {*seen[0].values()} == {3}


GENERATING = ("grpo", "rloo")


@check("wrapped model")
def wrapped_model(folder: str) -> None:
    for kind in ("trainer", *GENERATING):
        trainer, models = make(kind, None, folder, max_steps=1), []
        watched(trainer, "training_step", lambda model, *_, seen=models: seen.append(model))
        trainer.train()
        assert all(model is trainer.model_wrapped for model in models) and len(models) == 2


@check("own batches")
def own_batches(folder: str) -> None:
    for kind in GENERATING:
        trainer, calls = make(kind, None, folder, num_iterations=2, max_steps=4), []
        step = trainer.training_step

        def compared(*args: Any, own: Any = step, one: Any = trainer, to: Any = calls) -> Any:
            before = {key: repr(value) for key, value in vars(one).items()}
            to.append(one._step)
            loss = own(*args)
            changed = {key for key, value in vars(one).items() if before.get(key) != repr(value)}
            own_of_batches = {"_step", "_current_train_step_time", "_metrics"}
            of_generation = {"_buffered_inputs", "_logs", "state", "generation_config", "_scores"}
            assert {"_step", "_current_train_step_time"} <= changed | {"_current_train_step_time"}
            assert changed <= own_of_batches | of_generation, changed
            return loss

        trainer.training_step = compared
        watched(trainer, "_generate_and_score_completions", lambda _, to=calls: to.append("new"))
        trainer.train()
        assert calls == [0, "new", 1, 2, 3, 4, "new", 5, 6, 7]
        times = [entry["step_time"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(times) == 4 and trainer._current_train_step_time == 0.0


@check("own rows")
def own_rows(folder: str) -> None:
    for kind in GENERATING:
        trainer = make(kind, None, folder, max_steps=1, num_iterations=2, beta=0.1)
        prepare, seen = trainer._prepare_inputs, []
        trainer._prepare_inputs = lambda inputs, own=prepare, to=seen: (
            to.append(own(inputs)),
            to[-1],
        )[1]
        trainer.train()
        for batch in seen:
            widths = {name: value.shape for name, value in batch.items() if value is not None}
            assert {len(shape) and shape[0] for shape in widths.values()} <= {0, 4}, widths
            assert {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask"} <= {*widths}


@check("own generation")
def own_generation(folder: str) -> None:
    for kind in GENERATING:
        trainer, calls = make(kind, None, folder, max_steps=1), []

        def turned(prompts: Any, images: Any, fields: Any, *_: Any, to: Any = calls) -> None:
            assert (
                images is None and fields == {} and all(isinstance(each, list) for each in prompts)
            )
            to.append(len(prompts))

        generate = trainer._generate_single_turn
        watched(trainer, "_generate_single_turn", turned)
        watched(trainer.model, "generate", lambda to=calls, **_: to.append("generate"))
        trainer.train()
        assert calls == [8, "generate"], calls
        takes_count = "num_generations" in inspect.signature(generate).parameters
        made = generate([[5, 6], [7]], None, {}, *[4] * takes_count)
        ids = made[0] if isinstance(made, tuple) else made
        assert len(ids) == 2 and (not isinstance(made, tuple) or made[1] is None)


@check("own scoring")
def own_scoring(folder: str) -> None:
    for kind in GENERATING:
        trainer, calls = make(kind, None, folder, max_steps=1, num_iterations=2, beta=0.1), []
        name = "_get_per_token_logps_and_entropies"
        score = getattr(trainer, name)

        def scored(*args: Any, own: Any = score, to: Any = calls, **named: Any) -> Any:
            model, tokens, mask, width, *rest = args
            made = own(*args, **named)
            if not torch.is_grad_enabled():
                to.append((model, named.get("batch_size", *rest[:1])))
                assert made[0].shape == (len(tokens), width) and made[1:] == (None, None)
                assert tokens.shape == mask.shape and len(tokens) == 8
            return made

        setattr(trainer, name, scored)
        trainer.train()
        assert calls == [(trainer.model, 4), (trainer.ref_model, 4)]


@check("own prompts")
def own_prompts(folder: str) -> None:
    for kind in GENERATING:
        trainer = make(kind, None, folder)
        assert trainer._tokenize_prompts(["w0 w1", "w2"])[0] == [[3, 4], [5]]


@check("draws")
def draws(folder: str) -> None:
    shapes = []
    own = torch.multinomial

    def drawn(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        shapes.append((*probabilities.shape, num_samples))
        return own(probabilities, num_samples=num_samples)

    trainer = make("grpo", None, folder, max_steps=1)
    torch.multinomial = drawn  # type: ignore[assignment]
    try:
        trainer.train()
    finally:
        torch.multinomial = own  # type: ignore[assignment]
    assert 1 <= len(shapes) <= 12 and {*shapes} == {(8, 64, 1)}, shapes


def lightning_calls(**settings: Any) -> list[str]:
    """The hooks that Lightning's trainer calls in a training of five batches, in their order."""
    import lightning.pytorch as pl

    calls: list[str] = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def setup(self, stage: str) -> None:
            source = self.trainer.fit_loop._data_source
            own = type(source).dataloader
            source.dataloader = lambda: (calls.append("loader"), own(source))[1]

        def training_step(self, batch: Any) -> Any:
            calls.append("step")
            return self.layer(batch).sum()

        def optimizer_zero_grad(self, *args: Any) -> None:
            calls.append("zero")
            super().optimizer_zero_grad(*args)

        def backward(self, loss: Any) -> None:
            calls.append("backward")
            super().backward(loss)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            calls.append("optimizer")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", **quiet, **settings)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(5, 1)))
    return calls


@check("source of a loader")
def source_of_a_loader(folder: str) -> None:
    assert lightning_calls()[:2] == ["loader", "step"]


@check("order of a batch")
def order_of_a_batch(folder: str) -> None:
    assert lightning_calls()[1:] == ["step", "zero", "backward", "optimizer"] * 5


@check("end of a step")
def end_of_a_step(folder: str) -> None:
    calls = lightning_calls(accumulate_grad_batches=2)
    steps = [call for call in calls if call in ("step", "optimizer")]
    assert steps == ["step", "step", "optimizer"] * 2 + ["step", "optimizer"]


@pytest.mark.parametrize("name", FACTS)
def test_fact(name: str) -> None:
    if CHECKS[name].__name__ in ("source_of_a_loader", "order_of_a_batch", "end_of_a_step"):
        pytest.importorskip("lightning.pytorch")
    on_ranks(_in_a_folder, 2 if name == "broadcast_buffers" else 1, name)


def _in_a_folder(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        CHECKS[name](folder)
