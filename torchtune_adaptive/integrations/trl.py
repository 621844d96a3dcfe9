"""TRL's trainers that generate the rows they train on, with as many of them at once as fit.

    from torchtune_adaptive.integrations.transformers import adaptive

    trainer = adaptive(GRPOTrainer)(model, reward_funcs, args, train_dataset=dataset)

The rows of an optimizer step are completions. They are generated and scored in parts that fit, and trained on
in micro-batches of the size that a search finds before the first step. With vLLM, generation is its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from torchtune_adaptive.common import UsageError
from torchtune_adaptive.integrations import refusals
from torchtune_adaptive.integrations.completions import rows_of, together
from torchtune_adaptive.integrations.evaluation import Divisible
from torchtune_adaptive.integrations.mixin import AdaptiveMixin
from torchtune_adaptive.integrations.private import RolloutHooks
from torchtune_adaptive.integrations.rollout_step import RolloutStep, is_by_tokens
from torchtune_adaptive.integrations.terms import Terms


class AdaptiveRolloutMixin(RolloutHooks, AdaptiveMixin):
    """Makes a trainer generate completions and train on them with as many rows at once as fit.

        class AdaptiveGRPOTrainer(AdaptiveRolloutMixin, GRPOTrainer): ...

    Raises:
        UsageError: a setting of the trainer cannot be kept.
    """

    of_rollouts = True
    _step: int
    _current_train_step_time: float
    _scores = False
    """Whether completions are scored, and not trained on."""
    _prepared = False
    """Whether completions are evaluated that have been generated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refusals.require_supported_rollouts(self)

    def get_train_dataloader(self) -> Any:
        if not self.is_in_train:
            return super().get_train_dataloader()
        self._begin_training()
        loader = super().get_train_dataloader()
        self._adaptive_step = RolloutStep(self, loader)
        return loader

    def get_batch_samples(self, *args: Any, **named: Any) -> Any:
        self._adaptive_step.prepare()
        return super().get_batch_samples(*args, **named)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        began, step = time.perf_counter(), self._training()
        if step is None:  # called by hand
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        getattr(self.optimizer, "train", lambda: None)()  # of those that average weights
        step.add(self._prepare_inputs(inputs))
        # What the trainer's own training_step counts and times, which is called for micro-batches only.
        self._step += 1
        loss = step.take_added(model, super().training_step)
        self._current_train_step_time += time.perf_counter() - began
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        own, whole = super().prediction_step, self._prepare_inputs(inputs)
        rows = rows_of(whole)

        def predict(some: Any) -> Any:
            loss, *others = own(model, some, prediction_loss_only, ignore_keys)
            if is_by_tokens(self):  # parts of it add up, and are put together by their rows
                loss = loss * (len(rows) / len(some["completion_ids"]))
            return (loss, *others)

        parts = lambda numbers: together([rows[number] for number in numbers])  # noqa: E731
        batch = Divisible(rows, whole, parts, Terms.ROWS)
        self._prepared = True
        try:
            return self._adaptive_evaluation.take(model, batch, predict, "evaluation")
        finally:
            self._prepared = False

    def own_inputs(self, prepare: Callable[[Any], Any], inputs: Any) -> Any:
        step = self._training()
        if self._prepared or (step is not None and step.taking):  # some completions
            return {
                name: value.to(self.args.device) if isinstance(value, torch.Tensor) else value
                for name, value in inputs.items()
            }
        return prepare(inputs)

    def own_scoring(self, score: Callable[[Any], Any], inputs: Any) -> Any:
        step = self._training()
        self._scores = True
        try:
            with nullcontext() if step is None else step.reward_models_divided():
                return score(inputs)
        finally:
            self._scores = False

    def own_generation(
        self, generate: Callable[..., Any], prompts: Any, images: Any, fields: Any, *args: Any
    ) -> Any:
        step = self._training()
        if step is None:
            return generate(prompts, images, fields, *args)
        if images is not None or not all(len(each) == len(prompts) for each in fields.values()):
            raise UsageError(
                "images: only prompts of text are supported, as others cannot be split into rows."
            )
        if getattr(self, "use_vllm", False):
            return step.generated_by_vllm(lambda: generate(prompts, None, fields, *args))
        paired = False

        def ids(some: Any, their: Any) -> Any:
            nonlocal paired
            made = generate(some, None, their, *args)
            paired = isinstance(made, tuple)  # with log-probabilities, or None in their place
            return made[0] if paired else made

        made = step.generated(ids, prompts, fields)
        return (made, None) if paired else made

    def own_log_probs(
        self,
        score: Callable[..., Any],
        model: Any,
        input_ids: Any,  # as TRL names them, and some call it
        attention_mask: Any,
        logits_to_keep: int,
        batch_size: int | None = None,
        **named: Any,
    ) -> Any:
        step = self._training()
        if step is None or not self._scores:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, **named)
        own = lambda *some: score(model, *some, logits_to_keep, **named)[0]  # noqa: E731
        size = batch_size or len(input_ids)
        return step.scored(own, model, input_ids, attention_mask, size), None, None

    def _training(self) -> RolloutStep | None:
        """The steps of the training that runs; None outside of one."""
        step: RolloutStep | None = self._adaptive_step
        return step if self.is_in_train else None
