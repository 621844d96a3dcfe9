"""The private interfaces of other libraries that this package uses, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory


def pass_loader_through(trainer: Any, change: Callable[[Any], Any]) -> None:
    """Change the loader of training before Lightning's trainer looks at it, wherever it comes from."""
    source = trainer.fit_loop._data_source
    source.dataloader = lambda: change(type(source).dataloader(source))


def replace_batch_sampler(loader: Any, change: Callable[[Any], Any]) -> None:
    """Change the batch sampler of a loader that nobody has iterated over, which torch lets nobody set."""
    object.__setattr__(loader, "batch_sampler", change(loader.batch_sampler))


def pinned(batch: Any) -> Any:
    """A batch in pinned memory, as a loader of torch does it."""
    return pin_memory(batch)


def has_input_hooks(model: Any) -> bool:
    """Whether a model of transformers (5.16 to 5.23) has the hooks by which what its embeddings give requires
    gradients. Checkpointing brings them, and does not take them away."""
    return hasattr(model, "_require_grads_hook")


def builder_of(config: Any) -> type | None:
    """The class that ``build()`` of a config of torchtitan (0.3) makes, which has no public name."""
    owner: type | None = getattr(config, "_owner", None)
    return owner


def set_batches(trainer: Any, rows: int, accumulation: int) -> None:
    """Change the rows in a trainer's batches, and their number in a step, before it trains. When it is made,
    transformers (5.16 to 5.23) reads the rows from its arguments, and from this attribute later."""
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = rows
    trainer.args.gradient_accumulation_steps = accumulation


@contextmanager
def unpacked(model: torch.nn.Module) -> Iterator[None]:
    """A context in which a forward pass in evaluation mode leaves the 4-bit weights of bitsandbytes (0.50) as
    they are. On some CPUs it packs them, for good, for a kernel through which no gradient passes."""
    name = "support_avx512bf16_for_cpu"
    packing = [module for module in model.modules() if getattr(module, name, False)]
    for module in packing:
        setattr(module, name, False)
    try:
        yield
    finally:
        for module in packing:
            setattr(module, name, True)


def metrics_in(attributes: Mapping[str, Any], mode: str) -> dict[str, list[float]]:
    """The metrics of training or evaluation, ``train`` or ``eval``, that a trainer of TRL (1.9 to 1.16)
    averages when it logs, given its attributes."""
    found: dict[str, list[float]] = attributes.get("_metrics", {}).get(mode, {})
    return found


class SaveHook:
    """Passes the private method in which transformers (5.6 to 5.23) saves a checkpoint through a public one.
    No hook of its own runs before the first file, nor on each process after the last."""

    own_save: Callable[..., None]

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        trainer: Any = self
        folder = f"{trainer._get_output_dir(trial)}/checkpoint-{trainer.state.global_step}"
        self.own_save(super()._save_checkpoint, folder, model, trial)  # type: ignore[misc]


# TRL's GRPOTrainer and RLOOTrainer, 1.9 and 1.16: they generate and score in private methods, which have no
# hooks around them, and count their batches in private attributes.


class RolloutHooks:
    """Passes what these trainers do in private methods through public ones.

    Each of these gets the trainer's own method first, and then what that was called with.
    """

    own_inputs: Callable[..., Any]
    own_scoring: Callable[..., Any]
    own_generation: Callable[..., Any]
    own_log_probs: Callable[..., Any]

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self.own_inputs(super()._prepare_inputs, inputs)  # type: ignore[misc]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return self.own_scoring(super()._generate_and_score_completions, inputs)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any, **named: Any) -> Any:
        return self.own_generation(super()._generate_single_turn, *args, **named)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
        return self.own_log_probs(super()._get_per_token_logps_and_entropies, *args, **named)  # type: ignore[misc]


@contextmanager
def uncounted(trainer: Any) -> Iterator[None]:
    """A context in which ``training_step`` does not count, nor time: it is called for micro-batches."""
    count, seconds = trainer._step, trainer._current_train_step_time
    timed = list(trainer._metrics["train"].get("step_time", []))
    try:
        yield
    finally:
        trainer._step, trainer._current_train_step_time = count, seconds
        trainer._metrics["train"].pop("step_time", None)
        if timed:
            trainer._metrics["train"]["step_time"] = timed


def tokens_of(trainer: Any, prompts: list[Any]) -> list[list[int]]:
    """The tokens of each prompt."""
    tokens: list[list[int]] = trainer._tokenize_prompts(prompts)[0]
    return tokens


def takes_images(trainer: Any) -> bool:
    return bool(getattr(trainer, "_is_vlm", False))
