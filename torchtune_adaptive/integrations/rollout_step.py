"""The steps of one call of ``train`` of a trainer whose model generates the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtune_adaptive.common import TrainingOutOfMemory
from torchtune_adaptive.core import Generators
from torchtune_adaptive.integrations import private
from torchtune_adaptive.integrations.completions import (
    Completion,
    Draws,
    longest,
    rows_of,
    together,
)
from torchtune_adaptive.integrations.ending import lost_beside_vllm
from torchtune_adaptive.integrations.row_step import OnHost
from torchtune_adaptive.integrations.rows import KeptRows
from torchtune_adaptive.integrations.terms import Found, Terms
from torchtune_adaptive.integrations.trainer_step import TrainerStep
from torchtune_adaptive.integrations.undivided import why_not_divided
from torchtune_adaptive.library import AdaptiveStep, ForwardOnly

T = TypeVar("T")

_BY_TOKENS = ("cispo", "dapo", "vespo")
"""Losses that are divided by the tokens of all completions; others are means over rows."""
_LOOKED_AT = 64
"""Prompts with most characters of which the tokens are counted."""


def is_by_tokens(trainer: Any) -> bool:
    """Whether the loss of completions is divided by the tokens of all, and not by rows."""
    return getattr(trainer, "loss_type", None) in _BY_TOKENS


class RolloutStep(TrainerStep):
    """The steps of a trainer of TRL that generates completions, and trains on them.

    Generating and scoring are phases of the same ``AdaptiveStep``: they begin with the rows that the trainer
    itself takes at once, and go on in smaller parts where memory runs out. The loader gives prompts.
    """

    def __init__(self, trainer: Any, loader: Any) -> None:
        super().__init__(trainer, loader)
        self._completions: list[Completion] = []
        self._batches: list[int] = []
        """The rows of each batch of the step."""
        self._phases: dict[str, ForwardOnly] = {}
        self._work: Callable[[OnHost], Any] = OnHost
        """What the phase that runs does."""
        self.taking = False
        """Whether a step is taken or tried, whose micro-batches are ready."""

    # --- training ---------------------------------------------------------------------------------

    def add(self, batch: Mapping[str, Any]) -> None:
        """Add completions to the next step."""
        rows = rows_of(batch)
        self._completions += rows
        self._batches.append(len(rows))

    def take_added(self, model: Any, training_step: Callable[..., Any]) -> torch.Tensor:
        """Take a step with what was added, if that is all; until then there is nothing to do."""
        loss = self.take(model, [KeptRows(self._completions)], training_step, None)
        if self._trainer.accelerator.sync_gradients:
            self._completions, self._batches = [], []
        return loss

    def _collated(self, rows: Sequence[Completion]) -> dict[str, Any]:
        return together(rows)

    def _found_terms(self, step: AdaptiveStep) -> Found:
        """What is known of these losses."""
        why = why_not_divided(self._trainer, self._model)
        return Found(Terms.BATCH, why) if why else Found(Terms.ITEMS)

    def parts(self, rows: int) -> float:
        if self._whole or is_by_tokens(self._trainer):
            return len(self._batches)
        return self._rows_of_step / rows

    @contextmanager
    def around(self, step: AdaptiveStep) -> Iterator[None]:
        self.taking = True
        try:
            with private.uncounted(self._trainer), super().around(step):
                yield
        finally:
            self.taking = False

    def _sizes(self, batches: Sequence[KeptRows]) -> list[int]:
        return self._batches

    def _groups(self, batches: Sequence[KeptRows]) -> Sequence[int] | None:
        """All rows may share a micro-batch, as far as ``_most`` allows, if batches are divided."""
        return self._batches if self._whole else None

    def _most(self, rows: int) -> int:
        """Micro-batches have completions of one generation, which are equally long."""
        args = self._trainer.args
        batches = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        if batches == args.gradient_accumulation_steps:
            return rows
        alike = args.per_device_train_batch_size * batches
        return alike & -alike  # the largest power of two that divides them, as sizes are halved

    def _longest(self) -> Completion:
        trainer = self._trainer
        unit = trainer.pad_to_multiple_of or 1
        prompt, completion = self._longest_prompt(), trainer.max_completion_length
        return longest(
            self._completions[0], -(-prompt // unit) * unit, -(-completion // unit) * unit
        )

    def _longest_prompt(self) -> int:
        """The most tokens in a prompt of the data."""
        drawn = Generators(self._device)  # a dataset may draw random numbers
        try:
            prompts = list(self._loader.dataset["prompt"])
        finally:
            drawn.restore()
        prompts = sorted(prompts, key=lambda prompt: len(str(prompt)))[-_LOOKED_AT:]
        return max(map(len, private.tokens_of(self._trainer, prompts)))

    # --- what a checkpoint keeps ----------------------------------------------------------------------

    @property
    def learned(self) -> dict[str, Any] | None:
        learned = super().learned
        if learned is None:
            return None
        return learned | {"phases": {name: one.state_dict() for name, one in self._phases.items()}}

    def circumstances(self) -> str:
        args = self._trainer.args
        return f"{super().circumstances()} {args.steps_per_generation} {args.max_completion_length}"

    # --- before training, without gradients -----------------------------------------------------------

    def generated(
        self, generate: Callable[[list[Any], Any], list[Any]], prompts: Sequence[Any], fields: Any
    ) -> list[Any]:
        """The completions of prompts with their ``fields``; ``generate`` makes those of some prompts."""
        trainer, args = self._trainer, self._trainer.args
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        draws = Draws(len(prompts), self._device)

        def of(rows: Sequence[int]) -> list[Any]:
            some = {name: [values[row] for row in rows] for name, values in fields.items()}
            # Ends with the last row of this process: it launches no collective.
            alone = partial(model.generate, synced_gpus=False)
            with mock.patch.object(model, "generate", alone):
                return draws.of(rows, lambda: generate([prompts[row] for row in rows], some))

        size = args.per_device_train_batch_size * args.steps_per_generation
        size = size if trainer.model.training else args.eval_batch_size
        made = self._do("generation", of, rows=len(prompts), size=size, alone=True)
        draws.end()
        return made

    def generated_by_vllm(self, generate: Callable[[], T]) -> T:
        """What vLLM generates, which divides rows by itself.

        Nothing is done again: where memory runs out, the run ends, and says which setting to change.
        """
        engine, memory = self._trainer.vllm_generation, self.prepare().train_step.memory

        def by_itself() -> T:
            try:
                return generate()
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
                trouble = f"out of memory in vLLM ({error})"
                raise lost_beside_vllm(self._trainer, trouble, everywhere=False) from error

        sync = partial(self._weights_to_vllm, engine.sync_weights)
        with mock.patch.object(engine, "sync_weights", sync):
            if engine.mode == "server" or engine.tensor_parallel_size > 1:
                return by_itself()  # in which processes wait for each other
            return self._unless_any_fails("generation", by_itself)

    def _weights_to_vllm(self, sync: Callable[[], None]) -> None:
        """Give vLLM the weights that generate next, which a sharded model gathers one by one."""
        step = self.prepare()
        outcome = step.train_step.forward_only(
            "sending weights to vLLM", lambda: step.collective(sync)
        )
        if outcome.lost:
            raise lost_beside_vllm(self._trainer, outcome.trouble, everywhere=True)

    def scored(
        self,
        score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        model: Any,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        size: int,
    ) -> torch.Tensor:
        """The log-probability of each token of completions, by the trained model or the reference.

        Args:
            score: function that computes it, given the tokens of some rows and their mask.
            size: the rows that the trainer takes at once.
        """

        def of(rows: Sequence[int]) -> torch.Tensor:
            some = slice(rows[0], rows[-1] + 1)
            return score(tokens[some], mask[some])

        name = "scoring" if model is self._trainer.model else "scoring by the reference"
        sharded = any(isinstance(each, FSDPModule) for each in model.modules())
        made = self._do(name, of, rows=len(tokens), size=size, alone=not sharded)
        return torch.stack(made).to(tokens.device)

    @contextmanager
    def reward_models_divided(self) -> Iterator[None]:
        """A context in which reward models, which each process has whole, score as many rows as fit."""
        with ExitStack() as stack:
            for number, each in enumerate(self._trainer.reward_funcs):
                if isinstance(each, nn.Module):
                    name = f"scoring by reward_funcs[{number}]"
                    rewards = partial(self._rewards, name, each.forward)
                    stack.enter_context(mock.patch.object(each, "forward", rewards))
            yield

    def _rewards(self, name: str, forward: Callable[..., Any], **inputs: Any) -> SimpleNamespace:
        """What a reward model says of each row, as far as the trainer looks at it."""
        count = len(inputs["input_ids"])

        def of(rows: Sequence[int]) -> torch.Tensor:
            some = slice(rows[0], rows[-1] + 1)
            made = forward(**{key: each[some] for key, each in inputs.items()})
            logits: torch.Tensor = made.logits
            return logits

        # The trainer calls it in inference mode, where autograd cannot be reset after a failure.
        with torch.inference_mode(False):
            made = self._do(name, of, rows=count, size=count, alone=False)
        return SimpleNamespace(logits=torch.stack(made).to(self._device))

    def _do(
        self, name: str, work: Callable[[Sequence[int]], Any], *, rows: int, size: int, alone: bool
    ) -> list[Any]:
        """Do a phase for all rows of this process: ``work`` does it for some, given their numbers.

        ``alone`` is whether it launches no collective or, where the model is sharded, all parameters are
        gathered first. Then each process takes as many rows as fit there, and makes nobody wait.
        """
        trainer = self._trainer
        name += "" if trainer.model.training else " in evaluation"
        models = [trainer.model, *self.prepare().objective.frozen]
        modes = [(module, module.training) for model in models for module in model.modules()]

        def in_their_modes(held: OnHost) -> Any:
            for module, mode in modes:  # as the trainer has them, with dropout
                module.training = mode
            return work(held.value)

        self._work = in_their_modes
        phase = self._phases.get(name) or self._new_phase(name, alone)
        of_all = partial(phase, range(rows), OnHost, size)
        return self._unless_any_fails(name, of_all) if alone else of_all()

    def _unless_any_fails(self, name: str, work: Callable[[], T]) -> T:
        """What each process makes by itself; where it fails on one, it raises on all."""
        made: list[T] = []
        error = None
        try:
            made.append(work())
        except Exception as raised:
            error = raised
        if self.prepare().ranks.spread(int(error is not None))[1]:
            raise error or TrainingOutOfMemory(f"{name} failed on another process, which says why.")
        return made.pop()

    def _new_phase(self, name: str, alone: bool) -> ForwardOnly:
        phase = self.prepare().forward_only(lambda held: self._work(held), name=name, gathers=alone)
        learned = self._learned_before()
        if learned and name in learned["phases"]:
            phase.load_state_dict(learned["phases"][name])
        self._phases[name] = phase
        return phase
